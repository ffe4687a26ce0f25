"""The Triton kernels, interpreted, give the bits of the reference: every dtype, size and rule."""

from functools import partial
from itertools import pairwise

import kernel_cases
import pytest
import torch
from kernel_cases import (
    FLOATS,
    HALVES,
    NOT_FINITE,
    SIZES,
    SPECIAL,
    numbers,
    random_words,
    same,
    sparse_words,
)
from torch import Tensor

from dlion.ops import reference, triton

assert_ballots_agree = partial(kernel_cases.assert_ballots_agree, triton)
assert_verdicts_agree = partial(kernel_cases.assert_verdicts_agree, triton)

# what numpy, which the interpreter computes with, says of numbers that become infinite or stay NaN
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zeros", ["balanced", "exact"])
@pytest.mark.parametrize("special", [SPECIAL, SPECIAL + NOT_FINITE], ids=["finite", "not-finite"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_ballot_has_the_bits_of_the_reference(
    dtype: torch.dtype, kept: torch.dtype, zeros: str, special: list[float]
) -> None:
    momenta = [numbers(size, 10 + size).to(kept) for size in SIZES]
    grads = [numbers(size, 20 + size, special).to(dtype) for size in SIZES]
    for t in (0, 3):
        assert_ballots_agree(list(grads), momenta, t, zeros)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 200, 8191, 8192, 8193, 40_003])
def test_a_checksum_has_the_bits_of_the_reference(nbytes: int) -> None:
    memory = torch.randint(0, 256, (nbytes + 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    for first, number in ((0, 0), (1, 3), (8, 2**31), (16, 2**62)):
        held = memory[first : first + nbytes]  # at any address, as a slice of a bfloat16 parameter may be
        assert triton.hashed(held, number).equal(reference.hashed(held, number))
    turned = memory[: nbytes // 2 * 2].view(2, -1).t()
    assert triton.hashed(turned, 1).equal(reference.hashed(turned, 1))
    assert triton.hashed(torch.tensor(3.0).bfloat16(), 5).equal(reference.hashed(torch.tensor(3.0).bfloat16(), 5))


@pytest.mark.parametrize("zeros", ["balanced", "exact"])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_missing_gradients_count_as_zero(zeros: str, kept: torch.dtype) -> None:
    momenta = [numbers(2100, 1).to(kept), torch.zeros(130, dtype=kept), numbers(64, 2).to(kept)]
    for grads in ([None, None, torch.ones(64)], [None] * 3):
        for t in (4, 5):
            assert_ballots_agree(list(grads), momenta, t, zeros, gap=1)


def test_no_pieces_and_pieces_without_elements() -> None:
    for momenta in ([], [torch.zeros(0)], [torch.zeros(0), torch.tensor(3.0), torch.tensor(-2.0).bfloat16()]):
        assert_ballots_agree([torch.ones_like(momentum) for momentum in momenta], momenta, 1, "balanced", gap=1)
        assert_verdicts_agree(momenta, 2, "stochastic", 1)


def test_pieces_of_all_dtypes_in_one_bucket() -> None:
    for zeros in ("balanced", "exact"):
        grads = [numbers(2500, k).to(dtype) for k, dtype in enumerate(FLOATS * 2)]
        momenta = [numbers(2500, 10 + k).to([torch.float32, torch.bfloat16][k % 2]) for k in range(6)]
        assert_ballots_agree([*grads[:4], None, grads[5]], momenta, 3, zeros, gap=2)
    assert_verdicts_agree([numbers(2500, k).to(dtype) for k, dtype in enumerate(FLOATS * 2)], 2, "stochastic", 1)


def test_a_scattered_zero_takes_its_bit_from_the_hash() -> None:
    momentum = numbers(6400, 3)
    momentum[::3] = 0.0
    grad = numbers(6400, 4)
    grad[::3] = 0.0
    for t in (0, 1, 2, 3):
        assert_ballots_agree([grad], [momentum], t, "balanced")


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_worker_that_rests_moves_no_momentum(kept: torch.dtype) -> None:
    """And says the same; on the device alone it is known."""
    grads = [numbers(size, size, SPECIAL + NOT_FINITE) for size in (9000, 64, 65)]
    momenta = [numbers(9000, 1), numbers(64, 2).to(kept), numbers(65, 3).double()]
    for awake in (torch.tensor(True), torch.tensor(False), None):
        for t in (6, 7):
            assert_ballots_agree(list(grads), momenta, t, "balanced", awake=awake)
            assert_ballots_agree([None, grads[1], None], momenta, t, "exact", awake=awake)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_verdict_is_applied_as_by_the_reference(dtype: torch.dtype, rounding: str) -> None:
    params = [numbers(size, 30 + size, SPECIAL + NOT_FINITE).to(dtype) for size in SIZES]
    for planes in (1, 2, 3, 4, 5, 7, 8, 9):
        assert_verdicts_agree(params, planes, rounding, t=planes)


def test_a_rounded_momentum_never_becomes_infinite() -> None:
    most = torch.finfo(torch.bfloat16).max
    momenta = [torch.full((640,), sign * most, dtype=torch.bfloat16) for sign in (1, -1)]
    grads = [torch.full((640,), sign * 3.4e38) for sign in (1, -1)]
    for t in range(4):
        assert_ballots_agree(list(grads), momenta, t, "exact")
    triton.ballot(list(grads), momenta, [0, 640], [0, 0], 1280, [0.9], [0.5], [False], 0, 0, 0, "exact")
    assert all(momentum.isfinite().all() for momentum in momenta)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_number_is_read_and_written_exactly(dtype: torch.dtype) -> None:
    """What has 16 bits already is not changed by either rounding, and all values between two are rounded right."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    still = torch.zeros(1, 1024, dtype=torch.int64)
    for rounding in ("nearest", "stochastic"):
        param = halves.clone()
        triton.apply([param], still, [0], [0], [0.0, 0.0], [1.0], rounding, 0, 0, 0)
        assert same(param, halves)
    assert_ballots_agree([halves], [torch.zeros(2**16)], 0, "exact")
    for decay in (0.75, 1.0 + 2.0**-9, 1.0 - 2.0**-12, 1e-5, 1e4):
        param, other = halves.clone(), halves.clone()
        triton.apply([param], still, [0], [0], [0.0, 0.0], [decay], "nearest", 0, 0, 0)
        other.copy_(other.float() * decay)
        assert same(param, other)


@pytest.mark.parametrize("ties", ["rotate", "alternate"])
@pytest.mark.parametrize("words", [131, 512])
def test_a_majority_has_the_bits_of_the_reference(ties: str, words: int) -> None:
    for voters in [*range(1, 10), 15, 16, 17, 64]:
        for ballots in (random_words(voters, words), sparse_words(voters, words)):
            given = (ballots, 2**33 + 7, voters + 3, ties)
            assert torch.equal(triton.tally_majority(*given), reference.tally_majority(*given))


@pytest.mark.parametrize("ties", ["rotate", "alternate", "zero"])
@pytest.mark.parametrize("words", [131, 512])
def test_a_ternary_majority_has_the_bits_of_the_reference(ties: str, words: int) -> None:
    for voters in [*range(1, 10), 16, 33]:
        for nonzero in (random_words(voters, words), sparse_words(voters, words)):
            ballots = torch.stack([nonzero, nonzero & random_words(voters, words, seed=9)], 1)
            given = (ballots, 2**33 + 7, voters + 3, ties)
            assert torch.equal(triton.tally_majority_ternary(*given), reference.tally_majority_ternary(*given))


@pytest.mark.parametrize("words", [131, 512])
def test_counts_have_the_bits_of_the_reference(words: int) -> None:
    for voters in [*range(1, 10), 16, 64]:
        ballots, nonzero = random_words(voters, words), sparse_words(voters, words)
        ternary = torch.stack([nonzero, nonzero & ballots], 1)
        for more in (0, 2):  # planes for workers who are absent
            planes = voters.bit_length() + more
            assert torch.equal(triton.tally_count(ballots, planes), reference.tally_count(ballots, planes))
            planes = (2 * voters).bit_length() + more
            counted = triton.tally_count_ternary(ternary, planes)
            assert torch.equal(counted, reference.tally_count_ternary(ternary, planes))


def test_ballots_are_read_where_they_lie() -> None:
    """Rows with a header before the words, and voters picked from a larger buffer."""
    buffer = random_words(9, 2 + 3 * 267)
    rows = buffer[1::2, 2 : 2 + 2 * 267].view(4, 2, 267)
    given = (rows, 5, 3, "rotate")
    assert not rows.is_contiguous()
    assert torch.equal(triton.tally_majority_ternary(*given), reference.tally_majority_ternary(*given))
    assert torch.equal(triton.tally_majority(rows[:, 1], *given[1:]), reference.tally_majority(rows[:, 1], *given[1:]))
    every_second = buffer[:, ::2]
    assert torch.equal(triton.tally_count(every_second, 4), reference.tally_count(every_second, 4))


@pytest.mark.parametrize("dtype", FLOATS)
def test_pieces_may_start_anywhere_in_memory(dtype: torch.dtype) -> None:
    for odd in (1, 3, 4, 8):
        grads = [numbers(2300, 40)[odd : odd + 2200].to(dtype), numbers(90, 41).to(dtype)[odd : odd + 65]]
        momenta = [numbers(2300, 42)[odd : odd + 2200], numbers(73, 43).bfloat16()[odd : odd + 65]]
        assert_ballots_agree(list(grads), momenta, 2, "exact")
        param = numbers(2300, 44).to(dtype)
        around = param.clone()
        planes = random_words(1, 35)
        for tensor, kernels in ((param, triton), (around, reference)):
            kernels.apply([tensor[odd : odd + 2200]], planes, [0], [0], [0.1, -0.1], [0.9], "stochastic", 9, 1, 3)
        assert same(param, around)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_random_pieces_cut_from_one_layout(kept: torch.dtype) -> None:
    """Any cut into pieces gives the words of the whole."""
    size = 64 * 300
    grad, momentum = numbers(size, 60), numbers(size, 61).to(kept)
    grad[momentum > 0.5] = 0
    momentum[momentum > 0.5] = 0

    def words_of(runs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        moved = momentum.clone()
        grads, momenta = ([tensor[a:b] for a, b in runs] for tensor in (grad, moved))
        starts, groups = [a for a, _ in runs], [0] * len(runs)
        rest = (size, [0.9], [0.99], [False], 11, 7, 2, "balanced")
        return triton.ballot(list(grads), momenta, starts, groups, *rest)[0], moved

    places = torch.randperm(299, generator=torch.Generator().manual_seed(5))[:20] + 1
    whole, pieces = words_of([(0, size)]), words_of(list(pairwise([0, *sorted(64 * int(k) for k in places), size])))
    assert torch.equal(whole[0], pieces[0]) and same(whole[1], pieces[1])
