"""Tallies where only the device knows who votes: the kernels, interpreted, give the bits of the specification."""

from collections.abc import Iterator

import pytest
import torch
from kernel_cases import random_words, sparse_words
from torch import Tensor

from dlion.ops import chunks, reference, triton
from dlion.resident import counting

SIZES = [(1, 131), (2, 1), (3, 256), (5, 131), (8, 512), (33, 131)]  # workers and words
MOMENTS = (0, 7, 2**40 + 1, 2**62)  # the greatest is more than a step can ever be


def rosters(workers: int) -> Iterator[Tensor]:
    """Nobody votes, one, all but one, everybody, and some."""
    generator = torch.Generator().manual_seed(workers)
    some = torch.rand(workers, generator=generator)
    last = torch.arange(workers) == workers - 1
    for voting in (last & ~last, last, ~last, last | ~last, some < 0.5):
        yield counting.roster_of(voting)


def ballots_of(workers: int, words: int, planes: int) -> Iterator[Tensor]:
    """Rows as they arrive, two words of a header before each: of any bits, mostly equal, all ties, all zeros."""
    nonzero = sparse_words(workers, words)
    tied = torch.full((workers, words), -1) * (torch.arange(workers) % 2)[:, None]
    for made in (random_words(workers, words), nonzero, tied, torch.zeros_like(tied)):
        rows = torch.zeros(workers, 2 + planes * words, dtype=torch.int64)
        ballots = rows[:, 2:].view(workers, planes, words)
        ballots[:, -1] = made
        if planes == 2:  # all of a tie is said, of other ballots what is random
            ballots[:, 0] = -1 if made is tied else nonzero
        yield ballots


@pytest.mark.parametrize(("workers", "words"), SIZES)
def test_a_majority_of_those_who_vote(workers: int, words: int) -> None:
    for number, roster in enumerate(rosters(workers)):
        t, first = MOMENTS[number % len(MOMENTS)], (2**33 + 7, 0)[number % 2]
        for ballots in ballots_of(workers, words, 1):
            for ties in ("rotate", "alternate"):
                found = triton.majority(ballots, roster, first, torch.tensor(t), ties)[0]
                assert torch.equal(
                    found, counting.tally_majority(ballots[:, 0], roster, first, torch.tensor(t), ties)
                ), (number, ties)


@pytest.mark.parametrize(("workers", "words"), SIZES)
def test_a_ternary_majority_of_those_who_vote(workers: int, words: int) -> None:
    for number, roster in enumerate(rosters(workers)):
        t, first = MOMENTS[number % len(MOMENTS)], (2**33 + 7, 0)[number % 2]
        for ballots in ballots_of(workers, words, 2):
            for ties in ("rotate", "alternate", "zero"):
                given = (ballots, roster, first, torch.tensor(t), ties)
                assert torch.equal(triton.majority(*given), counting.tally_majority_ternary(*given)), (number, ties)


@pytest.mark.parametrize(("workers", "words"), SIZES)
def test_counts_of_those_who_vote(workers: int, words: int) -> None:
    planes = workers.bit_length()
    for roster in rosters(workers):
        for ballots in ballots_of(workers, words, 1):
            found = triton.count(ballots, roster, planes)
            assert torch.equal(found, counting.tally_count(ballots[:, 0], roster, planes))
        for ballots in ballots_of(workers, words, 2):
            found = triton.count(ballots, roster, planes + 1)
            assert torch.equal(found, counting.tally_count_ternary(ballots, roster, planes + 1))


def test_every_voter_has_its_turn() -> None:
    """Voters who disagree everywhere in equal numbers decide one word after another."""
    for absent, deciders in (((0, 2), [-1, 0]), ((), [0, -1, -1, 0])):
        ballots = torch.tensor([0, -1, -1, 0]).view(4, 1, 1).expand(4, 1, 9)
        voting = torch.tensor([rank not in absent for rank in range(4)])
        found = triton.majority(ballots, counting.roster_of(voting), 1, torch.tensor(4), "rotate")
        assert found[0].tolist() == [deciders[(4 // 2 + 1 + word) % len(deciders)] for word in range(9)]


def test_where_all_vote_the_roster_is_the_identity_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks.forget()
    sent: list[int] = []
    send = chunks.sent
    monkeypatch.setattr(chunks, "sent", lambda values, *rest: sent.append(len(values)) or send(values, *rest))
    ballots = random_words(5, 40)
    for _ in range(3):
        assert torch.equal(triton.tally_count(ballots, 3), reference.tally_count(ballots, 3))
    assert sent == [6]
    assert chunks.roster_of_all(5, ballots.device).tolist() == [5, 0, 1, 2, 3, 4]
