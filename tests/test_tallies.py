"""Guards the count of the votes: every tie rule, zeros, absent voters, averages, and that nothing drifts.

Held against voting_oracle, element by element.
"""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch
import voting_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlion.header import BallotHeader, Status
from dlion.ops import choose
from dlion.tallies import Count, Majority, Tally, TernaryMajority, TernaryVotes, Total, Votes

KERNELS = choose("reference")[1]
VOTERS = range(1, 10)
BIG = 2**20 + 3

quick = settings(max_examples=80, deadline=None)
steps = st.integers(0, 2**31 - 1)
places = st.integers(0, 2**40)


def tensor(rows: Sequence[Sequence[int]]) -> Tensor:
    """Words 0 <= word < 2**64 as the int64 that hold the same bits."""
    return torch.tensor([[word - 2**64 if word >= 2**63 else word for word in row] for row in rows])


def unsigned(planes: Tensor) -> list[list[int]]:
    return [[word % 2**64 for word in plane] for plane in planes.tolist()]


@st.composite
def binary_ballots(draw: st.DrawFn) -> list[list[int]]:
    """One row of words for each of 1 to 9 voters."""
    words = draw(st.integers(1, 3))
    word = st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**64 - 1, 2**63])
    return draw(st.lists(st.lists(word, min_size=words, max_size=words), min_size=1, max_size=9))


@st.composite
def ternary_votes(draw: st.DrawFn) -> list[list[int]]:
    """-1, 0 or +1 of 1 to 9 voters on up to 130 elements; zeros are frequent, so that ties are."""
    elements = draw(st.integers(1, 130))
    random = Random(draw(st.integers(0, 2**32)))
    zeros = draw(st.sampled_from([0, 1, 2, 8]))
    voters = draw(st.integers(1, 9))
    return [random.choices([-1, 1, *[0] * zeros], k=elements) for _ in range(voters)]


def signs_of(ballots: Sequence[Sequence[int]], element: int) -> list[int]:
    return [2 * oracle.bit_of(row, element) - 1 for row in ballots]


def ternary_rows(votes: Sequence[Sequence[int]]) -> Tensor:
    """i64[voters, 2, words]."""
    return torch.stack([tensor(oracle.ternary_ballot(row)) for row in votes])


def check_majority(ballots: Sequence[Sequence[int]], first_word: int, t: int, ties: str) -> None:
    counted = Majority(KERNELS, ties)(tensor(ballots)[:, None], first_word, t)
    assert counted.dtype == torch.int64 and counted.shape == (1, len(ballots[0]))
    (verdict,) = unsigned(counted)
    for element in range(64 * len(ballots[0])):
        expected = oracle.majority(signs_of(ballots, element), first_word + element // 64, t, ties)
        assert 2 * oracle.bit_of(verdict, element) - 1 == expected


def check_ternary(votes: Sequence[Sequence[int]], first_word: int, t: int, ties: str) -> None:
    counted = TernaryMajority(KERNELS, ties)(ternary_rows(votes), first_word, t)
    nonzero, positive = unsigned(counted)
    for element in range(64 * len(nonzero)):
        said = [row[element] if element < len(row) else 0 for row in votes]
        expected = oracle.majority(said, first_word + element // 64, t, ties)
        assert oracle.bit_of(nonzero, element) == (expected != 0)
        assert oracle.bit_of(positive, element) == (expected > 0)


@quick
@given(binary_ballots(), places, steps, st.sampled_from(["rotate", "alternate"]))
def test_majority_of_signs(ballots: list[list[int]], first_word: int, t: int, ties: str) -> None:
    check_majority(ballots, first_word, t, ties)


@quick
@given(ternary_votes(), places, steps, st.sampled_from(["rotate", "alternate", "zero"]))
def test_majority_of_ternary_votes(votes: list[list[int]], first_word: int, t: int, ties: str) -> None:
    check_ternary(votes, first_word, t, ties)


@quick
@given(binary_ballots(), st.integers(0, 7))
def test_the_count_of_votes_in_planes(ballots: list[list[int]], absent: int) -> None:
    workers = len(ballots) + absent
    counting = Votes(KERNELS, workers)
    planes = unsigned(counting(tensor(ballots)[:, None], 0, 0))
    assert len(planes) == counting.verdict_planes == math.ceil(math.log2(workers + 1))
    for element in range(64 * len(ballots[0])):
        assert oracle.number_of(planes, element) == sum(oracle.bit_of(row, element) for row in ballots)


@quick
@given(ternary_votes(), st.integers(0, 7))
def test_the_sum_of_ternary_votes_plus_the_voters_in_planes(votes: list[list[int]], absent: int) -> None:
    workers = len(votes) + absent
    counting = TernaryVotes(KERNELS, workers)
    planes = unsigned(counting(ternary_rows(votes), 0, 0))
    assert len(planes) == counting.verdict_planes == math.ceil(math.log2(2 * workers + 1))
    for element in range(len(votes[0])):
        assert oracle.number_of(planes, element) == sum(row[element] for row in votes) + len(votes)


@pytest.mark.parametrize("ties", ["rotate", "alternate", "zero"])
@pytest.mark.parametrize("voters", VOTERS)
def test_every_tie_of_every_number_of_voters(voters: int, ties: str) -> None:
    """As many +1 as -1, the rest zeros, in several orders: every word and step meets every decider."""
    random = Random(voters)
    columns = []
    for pairs in range(voters // 2 + 1):
        for _ in range(8):
            column = [1] * pairs + [-1] * pairs + [0] * (voters - 2 * pairs)
            random.shuffle(column)
            columns.append(column)
    votes = [[column[voter] for column in columns] for voter in range(voters)]
    for t in range(2 * voters + 2):
        for first_word in (0, 1, 2**33 + 1):
            check_ternary(votes, first_word, t, ties)
    if voters % 2 == 0 and ties != "zero":
        signs = [[vote for vote, column in zip(row, columns, strict=True) if 0 not in column] for row in votes]
        check_majority([oracle.ternary_ballot(row)[1] for row in signs], 5, 3, ties)


@pytest.mark.parametrize("elements", [0, 1, 63, 64, 65])
@pytest.mark.parametrize("voters", VOTERS)
def test_every_size(voters: int, elements: int) -> None:
    random = Random(elements)
    votes = [random.choices([-1, 0, 1], k=elements) for _ in range(voters)]
    if elements:
        check_ternary(votes, 3, 6, "rotate")
        check_majority([oracle.ternary_ballot(row)[1] for row in votes], 3, 6, "rotate")
        return
    empty = torch.empty(voters, 1, 0, dtype=torch.int64)
    assert Majority(KERNELS, "rotate")(empty, 0, 0).shape == (1, 0)
    assert TernaryMajority(KERNELS, "rotate")(empty.expand(voters, 2, 0), 0, 0).shape == (2, 0)
    assert Votes(KERNELS, voters)(empty, 0, 0).shape == (voters.bit_length(), 0)
    assert TernaryVotes(KERNELS, voters)(empty.expand(voters, 2, 0), 0, 0).shape == (
        (2 * voters).bit_length(),
        0,
    )


def test_a_million_elements() -> None:
    random = Random(0)
    ballots = [[random.getrandbits(64) for _ in range(-(-BIG // 64))] for _ in range(4)]
    check_majority(ballots, 7, 11, "rotate")


counts: list[tuple[Count, int]] = [
    (Majority(KERNELS, "rotate"), 1),
    (TernaryMajority(KERNELS, "rotate"), 2),
    (Votes(KERNELS, 9), 1),
    (TernaryVotes(KERNELS, 9), 2),
]


@pytest.mark.parametrize(("counting", "planes"), counts)
@quick
@given(
    present=st.lists(st.booleans(), min_size=9, max_size=9),
    seed=st.integers(0, 2**32),
    shard=st.integers(0, 8),
)
def test_absent_workers_are_as_if_they_were_not_there(
    counting: Count, planes: int, present: list[bool], seed: int, shard: int
) -> None:
    """Voter k is the k-th smallest rank of those that vote; words keep their number in the layout."""
    random = Random(seed)
    votes = [random.choices([-1, 1] if planes == 1 else [-1, 0, 1], k=128) for _ in range(9)]
    rows = ternary_rows(votes)[:, 2 - planes :].reshape(9, -1)
    headers = [BallotHeader(Status.OK if here else Status.ABSTAIN, 0, 5, 1, 2) for here in present]
    tally = Tally(counting, BallotHeader(Status.OK, 0, 5, 1, 2), first_word=11, shard_words=2)
    _, voters = tally.judge(torch.stack([header.encode() for header in headers]))
    assert voters == [rank for rank in range(9) if present[rank]]
    verdict = tally.count(rows, voters, shard)
    if not voters:
        assert not verdict.any() and len(verdict) == 2 * counting.verdict_planes
        return
    alone = counting(torch.stack([rows[rank].view(planes, 2) for rank in voters]), 11 + 2 * shard, 5)
    assert torch.equal(verdict, alone.reshape(-1))


def test_full_precision_is_summed() -> None:
    assert torch.equal(Total()(torch.tensor([[[1.0, 2.0]], [[3.0, -5.0]]]), 0, 0), torch.tensor([[4.0, -3.0]]))


@pytest.mark.parametrize("workers", [3, 9, 33])
def test_full_precision_is_summed_in_rank_order_whatever_the_shape(workers: int) -> None:
    """As a plain loop adds: (1e8 + 1) - 1e8 is 0 in float32, and every other order gives 1."""
    ballots = torch.randn(workers, 1, 100, generator=torch.Generator().manual_seed(workers))
    ballots[:3] = torch.tensor([1e8, 1.0, -1e8])[:, None, None]
    wanted = [0.0] * 100
    for ballot in ballots[:, 0].tolist():
        wanted = [float(np.float32(total) + np.float32(value)) for total, value in zip(wanted, ballot, strict=True)]
    assert Total()(ballots, 0, 0)[0].tolist() == wanted
    assert Total()(ballots[:, :, 37:38], 0, 0)[0].tolist() == wanted[37:38]


def balanced_rows(ranks: Sequence[int], words: int, t: int) -> list[list[int]]:
    return [oracle.sign_ballot([0.0] * 64 * words, 0, t, rank) for rank in ranks]


def drift(voters_of: Sequence[Sequence[int]], counting: str, elements: int = 128) -> float:
    """How far, in units of lr, the worst element strays whose message is zero on every worker, at any step.

    `voters_of[t]`: the ranks that vote in step t.
    """
    place, worst = [0.0] * elements, 0.0
    for t, ranks in enumerate(voters_of):
        rows = tensor(balanced_rows(ranks, elements // 64, t))[:, None]
        if counting == "average":
            planes = unsigned(Votes(KERNELS, 16)(rows, 0, t))
            moves = [(2 * oracle.number_of(planes, e) - len(ranks)) / len(ranks) for e in range(elements)]
        else:
            (verdict,) = unsigned(Majority(KERNELS, counting)(rows, 0, t))
            moves = [2.0 * oracle.bit_of(verdict, e) - 1 for e in range(elements)]
        place = [at - move for at, move in zip(place, moves, strict=True)]
        worst = max(worst, *map(abs, place))
    return worst


# Averages are sums of thirds, sevenths, ...: exact up to a few roundings of float64.
EPSILON = 1e-9
COUNTINGS = ("rotate", "alternate", "average")


@pytest.mark.wide(4)
@pytest.mark.parametrize("counting", COUNTINGS)
@pytest.mark.parametrize("voters", VOTERS)
def test_balanced_zeros_do_not_drift(voters: int, counting: str) -> None:
    assert drift([range(voters)] * 100, counting) <= 1 + EPSILON


@pytest.mark.parametrize("counting", COUNTINGS)
@pytest.mark.parametrize("absent", [0, 1, 3])
def test_balanced_zeros_do_not_drift_without_a_worker(absent: int, counting: str) -> None:
    assert drift([[rank for rank in range(4) if rank != absent]] * 60, counting) <= 1 + EPSILON


@pytest.mark.parametrize("counting", COUNTINGS)
def test_voters_that_change_between_pairs_of_steps_cause_no_drift(counting: str) -> None:
    random = Random(1)
    pairs = [random.sample(range(6), random.randint(1, 6)) for _ in range(60)]
    assert drift([sorted(pair) for pair in pairs for _ in range(2)], counting) <= 1 + EPSILON


@pytest.mark.parametrize("counting", COUNTINGS)
def test_a_change_inside_a_pair_adds_two_steps_at_most_and_of_random_sign(counting: str) -> None:
    """A worker that abstains in every second step changes the voters inside every pair."""
    changes = 100
    strayed = drift([range(4), range(3)] * changes, counting)
    # Random signs: about sqrt(K) changes of at most 2, and 128 elements stay below four deviations.
    assert 1 < strayed <= 8 * math.sqrt(changes)
    assert strayed <= 1 + 2 * changes
