"""The functions of a step on the device, each against its namesake on the host, for every kind of input."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from header_cases import ballot_header, ballot_rows, verdict_rows
from torch import Tensor
from unread import ReadError, watch
from unread import unread as nothing_read

from dlion import header
from dlion.codecs import CountPlanes, SignBits, SumPlanes, TernaryBits
from dlion.header import BallotHeader, Status, VerdictHeader
from dlion.ops import bits, reference
from dlion.resident import applying, counting, headers

assert watch
SIZES = (1, 2, 3, 4, 5, 8, 9)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def unread(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns that reads no tensor."""
    with nothing_read():
        return function(*args)


def whole(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int64)


# ---- headers


@pytest.mark.parametrize("workers", SIZES)
def test_who_votes_follows_from_the_same_headers(workers: int) -> None:
    seen = set()
    for seed in range(200):
        chance = random.Random(1000 * workers + seed)
        rows = ballot_rows(chance, workers)
        own = ballot_header(chance, chance.choice([1, 2, 5]))
        wanted, voters = header.judge([BallotHeader.decode(row.tolist()) for row in rows], own)
        found, roster = unread(headers.judge, torch.stack(rows), own.encode())
        assert found.tolist() == wanted.encode().tolist(), (rows, own)
        others = [rank for rank in range(workers) if rank not in voters]
        assert roster.tolist() == [len(voters), *voters, *others]
        assert unread(counting.voting_of, roster).nonzero().view(-1).tolist() == voters
        seen.add(wanted.status)
    assert seen == {Status.OK, *[*Status][2:6]} - ({Status.HYPERPARAMETERS_DIFFER} if workers == 1 else set())


@pytest.mark.parametrize("owners", SIZES)
def test_what_decides_follows_from_the_same_headers(owners: int) -> None:
    seen = set()
    for seed in range(200):
        chance = random.Random(1000 * owners + seed)
        rows = verdict_rows(chance, owners)
        wanted = header.worst([VerdictHeader.decode(row.tolist()) for row in rows], 2)
        found = unread(headers.worst, torch.stack(rows), 2)
        assert found.tolist() == wanted.encode().tolist(), rows
        parts = [headers.status_of, headers.voters_of, headers.abstentions_of, headers.offender_of]
        assert [int(part(found)) for part in parts] == [
            wanted.status,
            wanted.voters,
            wanted.abstentions,
            wanted.offender,
        ]
        seen.add(wanted.status)
    assert len(seen) > 3


def test_ballot_headers_are_those_of_the_host() -> None:
    for seed in range(100):
        chance = random.Random(seed)
        one = ballot_header(chance, 5)
        one = BallotHeader(one.status, one.bucket, one.t, one.layout, one.hyper)
        beyond = chance.getrandbits(8) << 32  # the host's numbers are longer than their places
        found = unread(
            headers.encode,
            whole(one.status),
            one.bucket + (beyond >> 16),
            whole(one.t + beyond),
            one.layout + beyond,
            whole(one.hyper),
        )
        assert found.tolist() == one.encode().tolist()


# ---- counting


def ballots_of(workers: int, planes: int, words: int, seed: int) -> Tensor:
    """Anybody's bits, among them those that no ballot has: positive and zero."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(-(2**62), 2**62, (3, planes, words), generator=generator)
    return few[torch.randint(3, (workers,), generator=generator)] ^ torch.randint(0, 2, (), generator=generator)


@pytest.mark.parametrize("workers", SIZES)
def test_counting_those_who_vote_is_counting_without_the_others(workers: int) -> None:
    for seed in range(12):
        chance = random.Random(seed)
        first, t = chance.choice([0, 7, 2**33]), chance.choice([0, 1, 2, 12345, 2**40 + 1])
        words = chance.choice([1, 2, 17])
        voting = torch.tensor([chance.random() < 0.7 for _ in range(workers)])
        roster = unread(counting.roster_of, voting)
        single, double = (ballots_of(workers, planes, words, seed) for planes in (1, 2))
        votes, pairs = single[:, 0], double
        planes = workers.bit_length()
        for ties in ("rotate", "alternate"):
            found = unread(counting.tally_majority, votes, roster, first, whole(t), ties)
            assert torch.equal(found, among(voting, reference.tally_majority, votes, first, t, ties))
        for ties in ("rotate", "alternate", "zero"):
            found = unread(counting.tally_majority_ternary, pairs, roster, first, whole(t), ties)
            assert torch.equal(found, among(voting, reference.tally_majority_ternary, pairs, first, t, ties))
        found = unread(counting.tally_count, votes, roster, planes)
        assert torch.equal(found, among(voting, reference.tally_count, votes, planes))
        found = unread(counting.tally_count_ternary, pairs, roster, planes + 1)
        assert torch.equal(found, among(voting, reference.tally_count_ternary, pairs, planes + 1))


def among(voting: Tensor, tally: Callable[..., Tensor], ballots: Tensor, *how: Any) -> Tensor:
    """The reference on the voters alone; what it would say of one worker, all zeros, where there are none."""
    return tally(ballots[voting], *how) if voting.any() else tally(ballots[:1], *how) & 0


# ---- ballots and steps


@pytest.mark.parametrize("zeros", ["balanced", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_ballot_asks_nobody_for_t(zeros: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for t in (0, 1, 2, 2**33 + 1):
        shapes = ((70,), (3, 5), (), (0,))
        grads = [torch.randn(shape, generator=generator).round() for shape in shapes]
        grads[1][0] = torch.nan
        start = [torch.randn(shape, generator=generator).round().to(dtype) for shape in shapes]
        how = ([0, 128, 192, 256], [0, 1, 0, 1], 256, [0.9, 0.5], [0.99, 0.7], [False, True], 5)
        wanted, found = [m.clone() for m in start], [m.clone() for m in start]
        words, finite = reference.ballot([*grads[:2], None, grads[3]], wanted, *how, t, 3, zeros)
        said, fine = unread(reference.ballot, [*grads[:2], None, grads[3]], found, *how, whole(t), 3, zeros)
        assert torch.equal(said, words) and bool(fine) == bool(finite)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("zeros", ["balanced", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_worker_that_rests_says_the_same_and_moves_no_momentum(zeros: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    grads = [torch.randn(70, generator=generator).round(), torch.full((3,), torch.inf)]
    start = [torch.randn(len(grad), generator=generator).round().to(dtype) for grad in grads]
    how = ([0, 128], [0, 0], 192, [0.9], [0.99], [False], 5, whole(3), 3, zeros)
    for count in (1, 2):
        kept, moved = [m.clone() for m in start[:count]], [m.clone() for m in start[:count]]
        places = [places[:count] for places in how[:2]]
        wanted, finite = unread(reference.ballot, grads[:count], moved, *places, *how[2:], torch.tensor(True))
        words, fine = unread(reference.ballot, grads[:count], kept, *places, *how[2:], torch.tensor(False))
        assert torch.equal(words, wanted) and bool(fine) == bool(finite) == (count == 1)
        assert all(map(torch.equal, kept, start)) and not torch.equal(moved[0], start[0])


LRS = (0.1, 1e-4, 0.0, 3e38)


@pytest.mark.parametrize("voters", [1, 2, 3, 7])
@pytest.mark.parametrize("down", [SignBits, TernaryBits, CountPlanes, SumPlanes])
def test_tables_and_decays_are_the_numbers_of_the_host(down: Any, voters: int) -> None:
    codec = down(reference) if down in (SignBits, TernaryBits) else down()
    planes = {SignBits: 1, TernaryBits: 2, CountPlanes: 3, SumPlanes: 4}[down]
    levels = codec.decode(torch.zeros(planes, 1, dtype=torch.int64), voters)
    lr, decay = torch.tensor(LRS, dtype=torch.float64), torch.tensor((0.1, 0.0, 0.3, 1e-9), dtype=torch.float64)
    found = unread(applying.tables_of, codec, planes, whole(voters), lr)
    assert [[number.hex() for number in row] for row in found.tolist()] == [
        [float(number).hex() for number in levels.table(each)] for each in LRS
    ]
    decays = unread(applying.decays_of, lr, decay)
    assert decays.tolist() == [1 - a * b for a, b in zip(LRS, decay.tolist(), strict=True)]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_move_by_the_same_bits_or_not_at_all(dtype: torch.dtype, rounding: str) -> None:
    generator = torch.Generator().manual_seed(2)
    applied = torch.tensor([[1e-2, 0.1], [3e-4, 0.3]], dtype=torch.float64)
    planes = torch.randint(-(2**62), 2**62, (3, 4), generator=generator)
    for t in (0, 5):
        start = [torch.randn(shape, generator=generator).to(dtype) for shape in ((70,), (5, 3), (0,))]
        start[1] = start[1].t()
        wanted, found, kept = ([p.clone() for p in start] for _ in range(3))
        where = ([0, 128, 192], [1, 0, 1])
        levels = CountPlanes().decode(planes, 5)
        tables = [step for lr, _ in applied.tolist() for step in levels.table(lr)]
        decays = [1 - lr * decay for lr, decay in applied.tolist()]
        reference.apply(wanted, planes, *where, tables, decays, rounding, 9, t, 0)
        for params, voters in ((found, 5), (kept, 0)):
            numbers = unread(applying.numbers, CountPlanes(), 3, whole(voters), applied)
            unread(applying.apply_there, params, planes, *where, numbers, rounding, 9, whole(t), 0)
        assert all(map(torch.equal, found, wanted)) and not torch.equal(found[0], start[0])
        assert all(map(torch.equal, kept, start))


def test_hashes_of_numbers_on_the_device_are_the_same() -> None:
    numbers = (0, 1, -1, 2**62, -(2**63))
    for a in numbers:
        for b in numbers:
            wanted = int(bits.mix64(a, b, 7))
            for one in ((whole(a), b), (a, whole(b)), (whole(a), whole(b))):
                assert int(bits.mix64(*one, 7)) == wanted
            assert bits.mix64(whole(a), torch.tensor([b, b]), 7).tolist() == [wanted] * 2


# ---- the test's own means


@pytest.mark.parametrize(
    "read",
    [
        Tensor.item,
        lambda x: x.tolist(),
        bool,
        int,
        float,
        lambda x: [0, 1][x],
        lambda x: torch.arange(3)[x],
        lambda x: torch.arange(3)[x == 1],
        lambda x: torch.arange(3).expand(3)[torch.tensor([True, False, True])],
        lambda x: torch.equal(x, x),
        lambda x: x.nonzero(),
        lambda x: "yes" if x else "no",
        lambda x: torch.where(x == 1, x, 2),
    ],
)
def test_a_read_is_noticed(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ReadError):
        unread(read, whole(1))
