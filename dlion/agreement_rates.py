"""How often each worker's votes are what was decided: counted by those who count votes, here and there in a few steps.

A worker that is broken or hostile agrees with the others less often than a coin would. What it says of itself plays no
part: every shard's owner sees all ballots of its shard, and counts a few hundred words of one bucket every tenth step.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dlion.channel import Channel
from dlion.codecs import Cast, SignBits, TernaryBits
from dlion.comparison import gathered
from dlion.layout import Bucket
from dlion.ops import bits
from dlion.pipeline import Wire
from dlion.stats import Stats
from dlion.tallies import TernaryMajority, TernaryVotes, Votes

EVERY = 10  # steps
WORDS = 256  # of each shard, in one bucket of such a step
NUMBERS = 4096  # likewise where ballots are numbers
SAMPLES = 5  # before anybody is suspected
MARGIN = 0.01  # below chance, and four standard deviations at least

ALL = -1  # a word of set bits


class Sample:
    """The votes of one bucket that are looked at, counted for each rank.

    Attributes:
        agreed, cast: of each rank, how many votes were the verdict's, and how many were looked at.
        voters: the ranks of the ballots that come, in their order.
    """

    def __init__(self, wire: Wire, bucket: Bucket, turn: int, workers: int) -> None:
        self._wire, self._bucket, self._turn = wire, bucket, turn
        self.agreed = [0] * workers
        self.cast = [0] * workers
        self.voters: list[int] = []

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
            equal, looked = _of_numbers(ballots[:, 0, here], verdict[0, here])
        else:
            mask = self._mask(first + start, width).to(ballots.device)
            equal, looked = _of_words(self._wire, ballots[..., here], verdict[:, here], mask)
        for rank, same, votes in zip(self.voters, equal.tolist(), looked.tolist(), strict=True):
            self.agreed[rank] += same
            self.cast[rank] += votes

    def _mask(self, first: int, width: int) -> Tensor:
        """i64[width]: the bits that are elements, not padding."""
        mask = torch.full((width,), ALL, dtype=torch.int64, device="cpu")
        for word, real in self._bucket.tails:
            if first <= word < first + width:
                mask[word - first] = real
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

    def close(self, t: int, owners: Channel | None, stats: Sequence[Stats]) -> None:
        """The step is over: bring its counts, if there are some, into the statistics; then a collective call.

        Args:
            owners: a channel to the workers who counted their parts; None where everything was counted here.
            stats: those that take them up.
        """
        if not self._is_due(t):
            return
        sample, self._sample = self._sample, None
        counts = sample.agreed + sample.cast if sample is not None else [0] * (2 * self._workers)
        if owners is not None:
            with owners.during("agreement rates"):
                rows = gathered(owners, counts, stats[0])
            counts = [sum(column) for column in zip(*rows, strict=True)]
        for each in stats:
            each.voted(counts[: self._workers], counts[self._workers :])

    def _is_due(self, t: int) -> bool:
        return self._counts and (t + 1) % EVERY == 0


def chance(wire: Wire, workers: int) -> float | None:
    """How often the vote of one of `workers` coins is what they all decide; None where nothing is counted.

    Its own vote is among those that decide, so this is more than half.
    """
    if not isinstance(wire.up, SignBits | TernaryBits | Cast):
        return None
    if isinstance(wire.up, Cast):  # numbers with a normal distribution, and the sign of their sum
        return 0.5 + math.asin(1 / math.sqrt(workers)) / math.pi
    ties_out = isinstance(wire.count, Votes | TernaryVotes)
    ties_out = ties_out or (isinstance(wire.count, TernaryMajority) and wire.count.ties == "zero")
    outcomes = [up for up in range(workers + 1) if not (ties_out and 2 * up == workers)]
    cases = [math.comb(workers, up) for up in outcomes]
    with_it = [case * max(up, workers - up) for case, up in zip(cases, outcomes, strict=True)]
    return sum(with_it) / workers / sum(cases)


def below_chance(stats: Stats, by_chance: float) -> list[int]:
    """The ranks that agree less often than coins would, while most of the others agree more often.

    A coin among workers that know something agrees less often than among coins, so a worker that says nothing is found
    too. Two workers cannot be told apart.
    """
    if stats.vote_samples < SAMPLES:
        return []
    found = []
    for rank, (rate, votes) in enumerate(zip(stats.agreement, stats.votes_sampled, strict=True)):
        if rate is not None:
            noise = 4 * math.sqrt(by_chance * (1 - by_chance) / votes)
            found += [rank] * (rate < by_chance - max(MARGIN, noise))
    above = sum(rate is not None and rate > by_chance for rate in stats.agreement)
    return found if 2 * above > len(stats.agreement) else []


def _of_numbers(ballots: Tensor, verdict: Tensor) -> tuple[Tensor, Tensor]:
    """f[voters, n] and f[n] -> i64[voters] each: how many have the verdict's sign, and how many have one."""
    looked = (ballots != 0) & (verdict != 0)
    return (looked & ((ballots > 0) == (verdict > 0))).sum(1), looked.sum(1)


def _of_words(wire: Wire, ballots: Tensor, verdict: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """i64[voters, planes, n], i64[planes, n] and i64[n] -> i64[voters] each, as of numbers; a tie is no sign."""
    up = ballots[:, -1]
    said = ballots[:, 0] & mask if ballots.shape[1] == 2 else mask.expand_as(up)
    if isinstance(wire.count, Votes | TernaryVotes):
        voters, ternary = len(ballots), isinstance(wire.count, TernaryVotes)
        middle, planes = voters if ternary else voters // 2, list(verdict)
        decided_up = bits.exceeds(planes, middle)
        tie = bits.equals(planes, middle) if ternary or voters % 2 == 0 else torch.zeros_like(mask)
        said = said & ~tie
    else:
        decided_up = verdict[-1]
        said = said & verdict[0] if len(verdict) == 2 else said
    return bits.ones(said & ~(up ^ decided_up)), bits.ones(said)
