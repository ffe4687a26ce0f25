"""Guards the wire: which bit stands for which element, how a zero votes, what a verdict means.

Held against voting_oracle.
"""

import math
from collections.abc import Sequence
from random import Random

import pytest
import torch
import voting_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlion.codecs import Cast, CountPlanes, Levels, Moment, SignBits, SumPlanes, TernaryBits
from dlion.layout import WORD, Layout
from dlion.ops import choose
from dlion.ops.bits import mix64

KERNELS = choose("reference")[1]
SIZES = (0, 1, 63, 64, 65, 2**20 + 3)

quick = settings(max_examples=60, deadline=None)
moments = st.builds(Moment, t=st.integers(0, 2**31 - 1), rank=st.integers(0, 4095))
# Zeros of both signs, the smallest numbers there are (denormal), and ordinary ones.
values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, math.inf, -math.inf])


def unsigned(words: Tensor) -> list[int]:
    return [word % 2**64 for word in words.tolist()]


def layout_of(sizes: Sequence[int], bucket_words: int = 2**14, align: int = WORD) -> Layout:
    return Layout.of(
        [{"params": [torch.zeros(size, requires_grad=True) for size in sizes]}], bucket_words * WORD, align
    )


def encode(
    layout: Layout, messages: Sequence[Sequence[float]], codec: SignBits | TernaryBits, moment: Moment
) -> Tensor:
    """What the buckets of a layout say, one after another: i64[planes, words]."""
    rows = []
    for bucket in layout.buckets:
        flat = torch.zeros(bucket.size, dtype=bucket.dtype)
        for piece in bucket.pieces:
            part = torch.tensor(messages[piece.slot][piece.start : piece.stop], dtype=bucket.dtype)
            flat[piece.offset : piece.offset + len(part)] = part
        rows.append(codec.encode(flat, bucket, moment))
    return torch.cat(rows, dim=1)


def signs(messages: Sequence[Sequence[float]], moment: Moment) -> list[int]:
    """The oracle's ballot: every tensor starts on a word of its own."""
    words: list[int] = []
    for message in messages:
        words += oracle.sign_ballot(message, len(words), moment.t, moment.rank)
    return words


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ((0, 0, 0), 0x238275BC38FCBE91),
        ((1, 2, 3), 0xD0734750FDE362B3),
        ((7, 2**33, 5), 0xC750839175628FDE),
    ],
)
def test_mix64_known_answers(arguments: tuple[int, int, int], answer: int) -> None:
    a, word, rank = arguments
    assert oracle.mix64(a, word, rank) == answer
    assert unsigned(mix64(a, torch.tensor([word]), rank)) == [answer]
    assert unsigned(mix64(a, word, torch.tensor([rank]))) == [answer]


@quick
@given(st.integers(0, 2**62), st.lists(st.integers(0, 2**62), max_size=5), st.integers(0, 2**31))
def test_mix64_is_the_formula(a: int, words: list[int], rank: int) -> None:
    hashed = mix64(a, torch.tensor(words, dtype=torch.int64), rank)
    assert unsigned(hashed) == [oracle.mix64(a, word, rank) for word in words]


@pytest.mark.wide(5)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("t", [6, 7])
def test_sign_ballots_of_every_size(size: int, t: int) -> None:
    random = Random(size + t)
    message = random.choices([0.0, -0.0, 2.5, -2.5], k=size)
    moment = Moment(t=t, rank=3)
    ballot = encode(layout_of([size]), [message], SignBits(KERNELS), moment)
    assert ballot.dtype == torch.int64 and ballot.shape == (1, -(-size // 64))
    assert unsigned(ballot[0]) == signs([message], moment)


@pytest.mark.parametrize("size", SIZES)
def test_ternary_ballots_of_every_size(size: int) -> None:
    message = Random(size).choices([0.0, -0.0, 2.5, -2.5], k=size)
    ballot = encode(layout_of([size]), [message], TernaryBits(KERNELS), Moment(t=1, rank=1))
    assert ballot.dtype == torch.int64 and ballot.shape == (2, -(-size // 64))
    assert tuple(unsigned(plane) for plane in ballot) == oracle.ternary_ballot(message)


@quick
@given(st.lists(st.lists(values, max_size=150), max_size=4), moments)
def test_ballots_of_several_tensors(messages: list[list[float]], moment: Moment) -> None:
    layout = layout_of([len(message) for message in messages])
    assert unsigned(encode(layout, messages, SignBits(KERNELS), moment)[0]) == signs(messages, moment)
    nonzero, positive = encode(layout, messages, TernaryBits(KERNELS), moment)
    parts = [oracle.ternary_ballot(message) for message in messages]
    assert unsigned(nonzero) == [word for part in parts for word in part[0]]
    assert unsigned(positive) == [word for part in parts for word in part[1]]


@quick
@given(st.lists(st.lists(values, max_size=300), max_size=4), moments, st.integers(1, 6))
def test_bits_do_not_depend_on_the_cut_into_buckets(
    messages: list[list[float]], moment: Moment, bucket_words: int
) -> None:
    layout = layout_of([len(message) for message in messages], bucket_words)
    assert max(bucket.words for bucket in layout.buckets) <= bucket_words
    assert unsigned(encode(layout, messages, SignBits(KERNELS), moment)[0]) == signs(messages, moment)


@quick
@given(st.integers(0, 200), st.integers(0, 2**30), st.integers(0, 63))
def test_a_zero_votes_the_other_way_in_the_odd_step(size: int, pair: int, rank: int) -> None:
    layout, zeros = layout_of([size]), [[0.0] * size]
    even = encode(layout, zeros, SignBits(KERNELS), Moment(2 * pair, rank))
    odd = encode(layout, zeros, SignBits(KERNELS), Moment(2 * pair + 1, rank))
    for element in range(size):
        word, bit = divmod(element, 64)
        assert int(even[0, word]) >> bit & 1 != int(odd[0, word]) >> bit & 1


def test_zeros_vote_evenly_and_apart() -> None:
    """Over many words about half of the zeros vote +1, and two workers agree on about half."""
    layout, zeros = layout_of([64_000]), [[0.0] * 64_000]
    one, other = (encode(layout, zeros, SignBits(KERNELS), Moment(4, rank))[0] for rank in (0, 1))
    ones = sum(word.bit_count() for word in unsigned(one))
    differ = sum(word.bit_count() for word in unsigned(one ^ other))
    # The standard deviation of 64,000 fair coins is 126: five of them.
    assert abs(ones - 32_000) < 640 and abs(differ - 32_000) < 640


def test_the_verdict_of_signs_is_minus_or_plus_one() -> None:
    levels = SignBits(KERNELS).decode(torch.tensor([[0b01]]), voters=5)
    assert decoded(levels, 2) == [1.0, -1.0]


def test_the_verdict_of_ternary_votes_has_a_zero() -> None:
    nonzero, positive = 0b011, 0b001
    levels = TernaryBits(KERNELS).decode(torch.tensor([[nonzero], [positive]]), voters=5)
    assert decoded(levels, 3) == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("voters", range(1, 10))
def test_a_count_means_the_mean_of_the_signs(voters: int) -> None:
    planes = planes_of(list(range(voters + 1)), math.ceil(math.log2(voters + 1)))
    expected = [(2 * count - voters) / voters for count in range(voters + 1)]
    assert decoded(CountPlanes().decode(planes, voters), voters + 1) == expected


@pytest.mark.parametrize("voters", range(1, 10))
def test_a_sum_means_the_mean_of_the_ternary_votes(voters: int) -> None:
    planes = planes_of(list(range(2 * voters + 1)), math.ceil(math.log2(2 * voters + 1)))
    expected = [(level - voters) / voters for level in range(2 * voters + 1)]
    assert decoded(SumPlanes().decode(planes, voters), 2 * voters + 1) == expected


def test_the_table_of_steps_is_computed_in_float64_left_to_right() -> None:
    lr, voters = 3e-4, 7
    levels = CountPlanes().decode(planes_of([0], 3), voters)
    assert levels.table(lr)[: voters + 1] == [lr * (2 * count - voters) / voters for count in range(voters + 1)]


def test_full_precision_travels_as_it_is() -> None:
    message = torch.tensor([0.1, -0.2, 1e-45])
    layout = layout_of([3], align=1)
    assert torch.equal(Cast().encode(message, layout.buckets[0], Moment(0, 0))[0], message)
    assert torch.equal(Cast().decode(torch.tensor([[3.0, -6.0]]), voters=3), torch.tensor([1.0, -2.0]))


def planes_of(numbers: Sequence[int], planes: int) -> Tensor:
    """One word a plane: element e holds the binary number `numbers[e]`."""
    return torch.tensor([[sum((n >> k & 1) << e for e, n in enumerate(numbers))] for k in range(planes)])


def decoded(levels: Levels, elements: int) -> list[float]:
    rows = [unsigned(plane) for plane in levels.planes]
    return [levels.numerators[oracle.number_of(rows, e)] / levels.denominator for e in range(elements)]
