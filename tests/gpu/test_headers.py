"""Headers, ledgers and the numbers of a step: the Triton kernels, interpreted, give the bits of the specification."""

import random
from inspect import isfunction, signature
from typing import Any

import pytest
import torch
from header_cases import ballot_header, ballot_rows, verdict_rows
from kernel_cases import same
from torch import Tensor

from dlion.codecs import CountPlanes, SignBits, SumPlanes, TernaryBits
from dlion.header import NOBODY, BallotHeader, Status, VerdictHeader
from dlion.ops import reference
from dlion.resident import by_torch, by_triton
from dlion.resident.entries import Entries, by_name

SIZES = (1, 2, 3, 5, 8, 33)


def whole(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int64)


def test_both_ways_have_the_same_functions() -> None:
    public = {name: each for name, each in vars(by_torch).items() if isfunction(each)}
    assert len(public) > 10
    for name, each in public.items():
        assert list(signature(getattr(by_triton, name)).parameters) == list(signature(each).parameters), name


def before_words(rows: list[Tensor], chance: random.Random) -> Tensor:
    """i64[n, 2] as it lies in what arrived: each header before some words."""
    words = chance.choice([0, 1, 3])
    arrived = torch.full((len(rows), 2 + words), -1, dtype=torch.int64)
    arrived[:, :2] = torch.stack(rows)
    return arrived[:, :2]


@pytest.mark.parametrize("awake", [None, True, False])
@pytest.mark.parametrize("finite", [None, True, False])
def test_a_ballot_header(finite: bool | None, awake: bool | None) -> None:
    flags = (None if flag is None else torch.tensor(flag) for flag in (finite, awake))
    finite_there, awake_there = flags
    for t, bucket, layout, hyper in ((0, 0, 0, 0), (2**40 + 7, 2**16 + 3, 2**40 + 5, NOBODY), (2**62, 9, NOBODY, 7)):
        for bad in (Status.ABSTAIN, Status.SKIP, Status.RAISE):
            given = (finite_there, awake_there, bad, Status.FINISHED, bucket, whole(t), layout, whole(hyper))
            header = by_triton.ballot_header(*given)
            assert torch.equal(header, by_torch.ballot_header(*given))
            said = Status.FINISHED if finite is None or awake is False else Status.OK if finite else bad
            assert int(header[0]) >> 8 & 0xFF == said


@pytest.mark.parametrize("workers", SIZES)
def test_who_votes_and_what_is_said_of_it(workers: int) -> None:
    for seed in range(60 if workers < 10 else 12):
        chance = random.Random(1000 * workers + seed)
        rows = before_words(ballot_rows(chance, workers), chance)
        own = ballot_header(chance, 5).encode()
        found, roster = by_triton.judge(rows, own)
        wanted, voters = by_torch.judge(rows, own)
        assert torch.equal(found, wanted) and torch.equal(roster, voters), rows


@pytest.mark.parametrize(
    ("said", "status", "offender"),
    [
        ([("OK", 7), ("FINISHED", 9), ("OK", 7), ("FINISHED", 9), ("FINISHED", 9)], Status.OK, NOBODY),
        ([("FINISHED", 9), ("FINISHED", 9), ("OK", 7), ("OK", 8), ("OK", 8)], Status.HYPERPARAMETERS_DIFFER, 2),
        ([("FINISHED", 9), ("FINISHED", 8)], Status.OK, NOBODY),
    ],
)
def test_who_has_finished_may_have_other_hyper_parameters(
    said: list[tuple[str, int]], status: Status, offender: int
) -> None:
    rows = torch.stack([BallotHeader(Status[name], 1, 5, 3, hyper).encode() for name, hyper in said])
    found, wanted = by_triton.judge(rows, rows[0]), by_torch.judge(rows, rows[0])
    assert all(map(torch.equal, found, wanted))
    verdict = VerdictHeader.decode(found[0].tolist())
    assert (verdict.status, verdict.offender) == (status, offender)


def test_more_workers_than_are_looked_at_at_once() -> None:
    chance = random.Random(1)
    one, own = ballot_header(chance, 1, (Status.OK,)).encode(), ballot_header(chance, 5).encode()
    rows = one.repeat(300, 1)
    rows[[3, 127, 128, 299], 0] |= Status.ABSTAIN << 8
    others = rows.clone()
    others[200:, 1] ^= 1  # another layout
    others[140, 0] ^= 1 << 40
    for each in (rows, others):
        found, wanted = by_triton.judge(each, own), by_torch.judge(each, own)
        assert all(map(torch.equal, found, wanted))
    assert int(by_triton.judge(rows, own)[1][0]) == 296


def ledger(chance: random.Random) -> Tensor:
    """Entries of a ledger after some steps, at times with trouble, in the midst of a step."""
    trouble = chance.choice([Status.OK, Status.OK, Status.OK, Status.RAISE, Status.HYPERPARAMETERS_DIFFER])
    counts = ("t", "steps", "skipped", "abstentions", "repeated")
    found = {name: chance.choice([0, 5, 2**40]) for name in counts}
    found |= {"status": trouble, "offender": chance.choice([0, NOBODY]), "slot": chance.choice([-1, 4])}
    found |= {"changed": 2, "began": 7}
    found |= {name: chance.randrange(2) for name in ("moved", "skips", "raises")}
    return torch.tensor(Entries(**found))


@pytest.mark.parametrize("owners", SIZES)
def test_what_a_bucket_and_a_step_write_down(owners: int) -> None:
    seen = set()
    for seed in range(80 if owners < 10 else 12):
        chance = random.Random(1000 * owners + seed)
        rows, entries = before_words(verdict_rows(chance, owners), chance), ledger(chance)
        others, workers = entries.clone(), chance.choice([1, 2, 2**15])
        for _ in range(2):
            voters = by_triton.enter(entries, rows, workers)
            assert torch.equal(voters, by_torch.enter(others, rows, workers))
            assert torch.equal(entries, others), rows
        by_triton.close(entries)
        by_torch.close(others)
        assert torch.equal(entries, others)
        said = by_name(entries)
        seen.add((int(voters) > 0, *(int(said[name]) for name in ("status", "moved", "skips", "raises"))))
    assert len(seen) > 4


DOWNS: list[tuple[Any, int]] = [
    (SignBits(reference), 1),
    (TernaryBits(reference), 2),
    (CountPlanes(), 1),
    (CountPlanes(), 4),
    (CountPlanes(), 11),
    (SumPlanes(), 2),
    (SumPlanes(), 5),
    (SumPlanes(), 12),
]


@pytest.mark.parametrize(("down", "planes"), DOWNS, ids=lambda value: type(value).__name__)
def test_the_numbers_of_a_step(down: Any, planes: int) -> None:
    lrs = (0.1, 1e-4, 0.0, -0.0, 3e38, 1e-42, 1 / 3)
    decays = torch.rand(len(lrs), generator=torch.Generator().manual_seed(planes)).double()
    applied = torch.stack([torch.tensor(lrs, dtype=torch.float64), decays], 1)
    for groups in (1, len(lrs)):
        for voters in (0, 1, 2, 3, 7, 1000):
            given = (down, planes, whole(voters), applied[:groups].clone())
            found, wanted = by_triton.numbers(*given), by_torch.numbers(*given)
            assert found.dtype == torch.float32 and wanted.dtype == torch.float64
            assert same(found, wanted.float())
    assert torch.equal(by_triton.numbers(down, planes, whole(0), applied)[:, -1], torch.ones(len(lrs)))
