"""How often each worker's votes are what was decided: counted by those who count votes, here and there in a few steps.

A worker that is broken or hostile agrees with the others no more often than a coin would. What it says of itself plays
no part: every shard's owner sees all ballots of its shard, and counts a few hundred words of one bucket every tenth
step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlion.asking import Ask, Rows, at_once
from dlion.channel import Channel
from dlion.codecs import Cast, SignBits, TernaryBits
from dlion.layout import Bucket
from dlion.ops import bits
from dlion.pipeline import Wire
from dlion.stats import Stats
from dlion.tallies import TernaryMajority, TernaryVotes, Votes

EVERY = 10  # steps
WORDS = 256  # of each shard, in one bucket of such a step
NUMBERS = 4096  # likewise where ballots are numbers
SAMPLES = 5  # before anybody is suspected
MARGIN = 0.01  # of a share; less above chance is no knowledge

ALL = -1  # a word of set bits


@dataclass(frozen=True)
class Counts:
    """Votes that were looked at, of each worker; sums of them are counts too.

    Attributes:
        agreed, looked: those that were the verdict's, of those that could be.
        coin_agreed, coin_looked: the same, in quarters, as expected of a coin in the worker's place among the others.
    """

    agreed: list[int]
    looked: list[int]
    coin_agreed: list[int]
    coin_looked: list[int]

    @staticmethod
    def summed(rows: Sequence[Sequence[int]], workers: int) -> "Counts":
        """From everybody's rows."""
        total = [sum(column) for column in zip(*rows, strict=True)]
        return Counts(*(total[k : k + workers] for k in range(0, 4 * workers, workers)))


class Sample:
    """The votes of one bucket that are looked at.

    Attributes:
        found: i64[4, workers], the fields of `Counts`, on the device of the ballots; None before there were any.
        voters: the ranks of the ballots that come, in their order; or bool[workers], where those of all come.
    """

    def __init__(self, wire: Wire, bucket: Bucket, turn: int, workers: int) -> None:
        self._wire, self._bucket, self._turn = wire, bucket, turn
        self._workers = workers
        self.found: Tensor | None = None
        self.voters: Any = []

    def take(self, ballots: Tensor, verdict: Tensor, first: int) -> None:
        """Count a part of a shard, which starts at word (or number) `first` of the bucket.

        Args:
            ballots: T[voters, planes, n]. verdict: T[planes, n].
        """
        numbers = isinstance(self._wire.up, Cast)
        real = min(ballots.shape[2], (self._bucket.size if numbers else self._bucket.words) - first)
        width = min(real, NUMBERS if numbers else WORDS)
        if width <= 0:
            return
        start = self._turn * width % (real - width + 1)
        here = slice(start, start + width)
        if numbers:
            found = _of_numbers(ballots[:, 0, here], verdict[0, here])
        else:
            voters = self.voters.sum() if isinstance(self.voters, Tensor) else len(ballots)
            votes, decided = _signs(self._wire, ballots[..., here], verdict[:, here], voters)
            votes = votes * bits.unpack(self._mask(first + start, width, votes.device))  # a zero plays no part
            if isinstance(self.voters, Tensor):
                votes = votes * self.voters[:, None]
            found = _of_votes(votes, decided, ties_out(self._wire))
        if self.found is None:
            self.found = found.new_zeros(4, self._workers)
        self.found[:, slice(None) if isinstance(self.voters, Tensor) else self.voters] += found

    def _mask(self, first: int, width: int, device: torch.device) -> Tensor:
        """i64[width]: the bits that are elements, not padding."""
        mask = torch.full((width,), ALL, dtype=torch.int64, device=device)
        for word, real in self._bucket.tails:
            if first <= word < first + width:
                mask[word - first].fill_(real)  # to assign a number would wait for the device
        return mask


class AgreementRates:
    """Chooses what is looked at, and brings the counts together.

    Args:
        wire: of the method; where its ballots have no signs that mean something, nothing is counted.
        workers: how many there are; one alone always agrees.
    """

    def __init__(self, wire: Wire, workers: int) -> None:
        self._wire, self._workers = wire, workers
        self._counts = workers > 1 and isinstance(wire.up, SignBits | TernaryBits | Cast)
        self._sample: Sample | None = None

    def sample(self, bucket: Bucket, t: int, buckets: int) -> Sample | None:
        """What to count of this bucket of `buckets`, in the step after `t` applied verdicts; mostly nothing."""
        turn = t // EVERY
        if not self._is_due(t) or bucket.number != turn % buckets:
            return None
        self._sample = Sample(self._wire, bucket, turn // buckets, self._workers)
        return self._sample

    def close(self, t: int, owners: Channel | None, stats: Sequence[Stats], ask: Ask = at_once) -> None:
        """The step is over: bring its counts, if there are some, into the statistics; then a collective call.

        Args:
            owners: a channel to the workers who counted their parts; None where everything was counted here.
            stats: those that take them up.
            ask: how the owners' counts are heard.
        """
        if not self._is_due(t):
            return
        sample, self._sample = self._sample, None
        found = sample.found if sample is not None else None
        numbers = found.reshape(-1) if found is not None else self._nothing(owners)

        def voted(rows: Rows) -> None:
            counts = Counts.summed(rows, self._workers)
            for each in stats:
                each.voted(counts.agreed, counts.looked, counts.coin_agreed, counts.coin_looked)

        ask(owners, "agreement rates", numbers, stats[0], voted)

    def _nothing(self, owners: Channel | None) -> Tensor:
        return torch.zeros(4 * self._workers, dtype=torch.int64, device=owners.device if owners else "cpu")

    def _is_due(self, t: int) -> bool:
        return self._counts and (t + 1) % EVERY == 0


def below_chance(stats: Stats) -> list[int]:
    """The ranks whose votes agree no more often than those of a coin in their place would, while most know better.

    A coin's vote is among those that decide, so it agrees in more than half of the cases, the more often the less the
    others agree among themselves; the counts say how often. Who says nothing useful is found by it, and who votes
    against the others all the more. Two workers cannot be told apart.
    """
    if stats.vote_samples < SAMPLES:
        return []
    found, above = [], 0
    for rank, (rate, coin) in enumerate(zip(stats.agreement, stats.agreement_by_chance, strict=True)):
        if rate is not None and coin is not None:
            margin = max(MARGIN, 2 / math.sqrt(stats.votes_looked[rank]))  # four standard deviations
            found += [rank] * (rate - coin < margin)
            above += rate - coin > 2 * margin
    return found if 2 * above > len(stats.agreement) else []


def _of_numbers(ballots: Tensor, total: Tensor) -> Tensor:
    """f[voters, n] and their sum f[n] -> i64[4, voters], the fields of `Counts`. A coin keeps its number's size."""
    said = ballots != 0
    looked = said & (total != 0)
    agreed = looked & ((ballots > 0) == (total > 0))
    decides = said & (ballots.abs() > (total - ballots).abs())
    everything = said.sum(1)
    return torch.stack([agreed.sum(1), looked.sum(1), 2 * everything + 2 * decides.sum(1), 4 * everything])


def _of_votes(votes: Tensor, decided: Tensor, ties_out: bool) -> Tensor:
    """i8[voters, n] and i8[n] of -1, 0 and +1 -> i64[4, voters], the fields of `Counts`."""
    said = votes != 0
    looked = said & (decided != 0)
    agreed = looked & (votes == decided)
    others = (votes.sum(0, dtype=torch.int16) - votes).abs()
    everything = said.sum(1)
    alone = (said & (others == 0)).sum(1)  # a coin decides
    ties = (said & (others == 1)).sum(1)  # half of the time a coin makes a tie, and of ties it wins half
    coin = [2 * everything + 2 * alone, 4 * everything - 2 * ties]
    if not ties_out:
        coin = [coin[0] + ties, 4 * everything]
    return torch.stack([agreed.sum(1), looked.sum(1), *coin])


def _signs(wire: Wire, ballots: Tensor, verdict: Tensor, voters: bits.Whole) -> tuple[Tensor, Tensor]:
    """i64[rows, planes, w] and i64[planes, w] -> what each row says, i8[rows, 64*w], and the verdict's signs."""
    votes = _of_planes(ballots.transpose(0, 1))
    if isinstance(wire.count, Votes):
        return votes, (2 * bits.levels(verdict) - voters).sign().to(torch.int8)
    if isinstance(wire.count, TernaryVotes):
        return votes, (bits.levels(verdict) - voters).sign().to(torch.int8)
    return votes, _of_planes(verdict[:, None])[0]


def _of_planes(planes: Tensor) -> Tensor:
    """i64[1 or 2 planes, rows, w] -> i8[rows, 64*w]: -1 and +1; of two planes the first says where it is not 0."""
    rows = planes.shape[1]
    said = [bits.unpack(plane.reshape(-1)).view(torch.int8).view(rows, -1) for plane in planes]
    signs = 2 * said[-1] - 1
    return signs * said[0] if len(said) == 2 else signs


def ties_out(wire: Wire) -> bool:
    """Whether nothing is decided where as many are for as against."""
    exact = isinstance(wire.count, TernaryMajority) and wire.count.ties == "zero"
    return exact or isinstance(wire.count, Votes | TernaryVotes)
