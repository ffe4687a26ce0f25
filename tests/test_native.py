"""The compiled kernels give the bits of the reference: every path, dtype, size and rule."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from kernel_cases import FLOATS, HALVES, LARGE, NOT_FINITE, SIZES, SPECIAL, numbers, random_words, same, sparse_words
from native_cases import assert_ballots_agree, assert_verdicts_agree, forced, paths
from torch import Tensor

from dlion.ops import native, reference


@pytest.fixture(params=paths())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from forced(request.param)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zeros", ["balanced", "exact"])
@pytest.mark.parametrize("special", [SPECIAL, SPECIAL + NOT_FINITE], ids=["finite", "not-finite"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_ballot_has_the_bits_of_the_reference(
    path: str, dtype: torch.dtype, kept: torch.dtype, zeros: str, special: list[float]
) -> None:
    momenta = [numbers(size, 10 + size).to(kept) for size in SIZES]
    grads = [numbers(size, 20 + size, special).to(dtype) for size in SIZES]
    for t in (0, 3):
        assert_ballots_agree(list(grads), momenta, t, zeros)


@pytest.mark.parametrize("zeros", ["balanced", "exact"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_missing_gradients_count_as_zero(path: str, zeros: str, kept: torch.dtype) -> None:
    momenta = [numbers(100, 1).to(kept), torch.zeros(130, dtype=kept), numbers(64, 2).to(kept)]
    for grads in ([None, None, torch.ones(64)], [None] * 3):
        for t in (4, 5):
            assert_ballots_agree(list(grads), momenta, t, zeros, gap=1)


def test_a_large_ballot_and_its_verdict(path: str) -> None:
    grads, momenta = [numbers(LARGE, 3), numbers(777, 4)], [numbers(LARGE, 5), numbers(777, 6)]
    assert_ballots_agree(list(grads), momenta, 1, "balanced")
    assert_ballots_agree(list(grads), [momentum.bfloat16() for momentum in momenta], 1, "balanced")
    assert_verdicts_agree([numbers(LARGE, 7).bfloat16(), numbers(70, 8)], 3, "stochastic", 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_verdict_is_applied_as_by_the_reference(path: str, dtype: torch.dtype, rounding: str) -> None:
    params = [numbers(size, 30 + size, SPECIAL + NOT_FINITE).to(dtype) for size in SIZES]
    for planes in (1, 2, 3, 4, 5, 7):
        assert_verdicts_agree(params, planes, rounding, t=planes)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_tensor_is_applied_as_by_the_reference(path: str, dtype: torch.dtype) -> None:
    param = numbers(1000, 9).to(dtype)
    other = param.clone()
    verdict = random_words(2, 20)[:, 1:18]
    where = ([0], [0], [0.1, -0.2, 0.3, 0.0], [0.99], "nearest", 0, 0, 0)
    native.apply([param], verdict, *where)
    reference.apply([other], verdict, *where)
    assert same(param, other)


def test_a_rounded_momentum_never_becomes_infinite(path: str) -> None:
    most = torch.finfo(torch.bfloat16).max
    momenta = [torch.full((640,), sign * most, dtype=torch.bfloat16) for sign in (1, -1)]
    grads = [torch.full((640,), sign * 3.4e38) for sign in (1, -1)]
    for t in range(4):
        assert_ballots_agree(list(grads), momenta, t, "exact")
    native.ballot(grads, momenta, [0, 640], [0, 0], 1280, [0.9], [0.5], [False], 0, 0, 0, "exact")
    assert all(momentum.isfinite().all() for momentum in momenta)


def every_half(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_number_is_read_and_written_exactly(path: str, dtype: torch.dtype) -> None:
    """What has 16 bits already is not changed by either rounding, and all values between two are rounded right."""
    halves = every_half(dtype)
    still = torch.zeros(1, 1024, dtype=torch.int64)
    for rounding in ("nearest", "stochastic"):
        param = halves.clone()
        native.apply([param], still, [0], [0], [0.0, 0.0], [1.0], rounding, 0, 0, 0)
        assert same(param, halves)
    assert_ballots_agree([halves], [torch.zeros(2**16)], 0, "exact")
    for decay in (0.75, 1.0 + 2.0**-9, 1.0 - 2.0**-12, 1e-5, 1e4):
        param, other = halves.clone(), halves.clone()
        native.apply([param], still, [0], [0], [0.0, 0.0], [decay], "nearest", 0, 0, 0)
        other.copy_(other.float() * decay)
        assert same(param, other)


@pytest.mark.parametrize("ties", ["rotate", "alternate"])
def test_a_majority_has_the_bits_of_the_reference(path: str, ties: str) -> None:
    for voters in [*range(1, 18), 64, 200]:
        for ballots in (random_words(voters, 131), sparse_words(voters, 131)):
            given = (ballots, 2**33 + 7, voters + 3, ties)
            assert torch.equal(native.tally_majority(*given), reference.tally_majority(*given))


@pytest.mark.parametrize("ties", ["rotate", "alternate", "zero"])
def test_a_ternary_majority_has_the_bits_of_the_reference(path: str, ties: str) -> None:
    for voters in [*range(1, 10), 16, 33]:
        for nonzero in (random_words(voters, 131), sparse_words(voters, 131)):
            ballots = torch.stack([nonzero, nonzero & random_words(voters, 131, seed=9)], 1)
            given = (ballots, 2**33 + 7, voters + 3, ties)
            assert torch.equal(native.tally_majority_ternary(*given), reference.tally_majority_ternary(*given))


def test_counts_have_the_bits_of_the_reference(path: str) -> None:
    for voters in [*range(1, 10), 16, 64, 100]:
        for more in (0, 2):  # planes for workers who are absent
            ballots = random_words(voters, 131)
            planes = voters.bit_length() + more
            assert torch.equal(native.tally_count(ballots, planes), reference.tally_count(ballots, planes))
            nonzero = sparse_words(voters, 131)
            ternary = torch.stack([nonzero, nonzero & ballots], 1)
            planes = (2 * voters).bit_length() + more
            assert torch.equal(
                native.tally_count_ternary(ternary, planes), reference.tally_count_ternary(ternary, planes)
            )


def test_ballots_are_read_where_they_lie(path: str) -> None:
    """Rows with a header before the words, and voters picked from a larger buffer."""
    buffer = random_words(9, 2 + 3 * 67)
    rows = buffer[1::2, 2 : 2 + 2 * 67].view(4, 2, 67)
    given = (rows, 5, 3, "rotate")
    assert not rows.is_contiguous()
    assert torch.equal(native.tally_majority_ternary(*given), reference.tally_majority_ternary(*given))
    assert torch.equal(native.tally_majority(rows[:, 1], *given[1:]), reference.tally_majority(rows[:, 1], *given[1:]))
    every_second = buffer[:, ::2]
    assert torch.equal(native.tally_count(every_second, 4), reference.tally_count(every_second, 4))


@pytest.mark.parametrize("dtype", FLOATS)
def test_pieces_may_start_anywhere_in_memory(path: str, dtype: torch.dtype) -> None:
    for odd in (1, 3, 5):
        grads = [numbers(300, 40)[odd : odd + 200].to(dtype), numbers(90, 41).to(dtype)[odd : odd + 65]]
        momenta = [numbers(300, 42)[odd : odd + 200], numbers(70, 43).bfloat16()[odd : odd + 65]]
        assert_ballots_agree(list(grads), momenta, 2, "exact")
        param = numbers(300, 44).to(dtype)
        around = param.clone()
        planes = random_words(1, 4)
        for tensor, kernels in ((param, native), (around, reference)):
            kernels.apply([tensor[odd : odd + 200]], planes, [0], [0], [0.1, -0.1], [0.9], "stochastic", 9, 1, 3)
        assert same(param, around)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_random_pieces_cut_from_one_layout(path: str, kept: torch.dtype) -> None:
    """Any cut into pieces gives the words of the whole."""
    size = 64 * 300
    grad, momentum = numbers(size, 60), numbers(size, 61).to(kept)
    grad[momentum > 0.5] = 0
    momentum[momentum > 0.5] = 0
    whole = momentum.clone()
    wanted, _ = native.ballot([grad], [whole], [0], [0], size, [0.9], [0.99], [False], 11, 7, 2, "balanced")
    cuts = [
        0,
        *sorted(64 * int(k) for k in torch.randperm(299, generator=torch.Generator().manual_seed(5))[:20] + 1),
        size,
    ]
    runs = list(pairwise(cuts))
    cut = momentum.clone()
    pieces = [cut[a:b] for a, b in runs]
    words, _ = native.ballot(
        [grad[a:b] for a, b in runs],
        pieces,
        cuts[:-1],
        [0] * len(runs),
        size,
        [0.9],
        [0.99],
        [False],
        11,
        7,
        2,
        "balanced",
    )
    assert torch.equal(words, wanted) and same(cut, whole)
