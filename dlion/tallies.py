"""From the ballots of a shard to its verdict. Ties and absent voters are decided here, and nothing else knows them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from dlion.header import BallotHeader, judge

TIES = ("rotate", "alternate", "zero")


class Count(Protocol):
    """The pure counting of ballots: voters in rank order, at least one.

    Attributes:
        ballot_planes, verdict_planes: rows hold this many planes of words, one after another.
    """

    @property
    def ballot_planes(self) -> int: ...

    @property
    def verdict_planes(self) -> int: ...

    def __call__(self, ballots: Tensor, first_word: int, t: int) -> Tensor:
        """T[voters, ballot_planes, n] -> T[verdict_planes, n]."""


def in_rank_order(rows: Tensor, onto: Callable[[Tensor, Tensor], object]) -> Tensor:
    """f[workers, ...] -> f[...]: one row after another put `onto` a copy of the first.

    torch's own reductions add in an order that depends on shapes, so shards and whole buckets would not agree to the
    bit.
    """
    total = rows[0].clone()
    for row in rows[1:]:
        onto(total, row)
    return total


@dataclass(frozen=True)
class Majority:
    """One bit from each voter, one bit back. `ties`: "rotate" or "alternate"."""

    kernels: ModuleType
    ties: str
    ballot_planes = 1
    verdict_planes = 1

    def __call__(self, ballots: Tensor, first_word: int, t: int) -> Tensor:
        verdict: Tensor = self.kernels.tally_majority(ballots[:, 0], first_word, t, self.ties)
        return verdict[None]


@dataclass(frozen=True)
class TernaryMajority:
    """-1, 0 or +1 from each voter and back; a zero abstains at its element. `ties`: also "zero"."""

    kernels: ModuleType
    ties: str
    ballot_planes = 2
    verdict_planes = 2

    def __call__(self, ballots: Tensor, first_word: int, t: int) -> Tensor:
        verdict: Tensor = self.kernels.tally_majority_ternary(ballots, first_word, t, self.ties)
        return verdict


@dataclass(frozen=True)
class Votes:
    """One bit from each voter; back comes how many were set, in as many planes as `workers` needs."""

    kernels: ModuleType
    workers: int
    ballot_planes = 1

    @property
    def verdict_planes(self) -> int:
        return self.workers.bit_length()

    def __call__(self, ballots: Tensor, first_word: int, t: int) -> Tensor:
        verdict: Tensor = self.kernels.tally_count(ballots[:, 0], self.verdict_planes)
        return verdict


@dataclass(frozen=True)
class TernaryVotes:
    """-1, 0 or +1 from each voter; back comes their sum plus the number of voters."""

    kernels: ModuleType
    workers: int
    ballot_planes = 2

    @property
    def verdict_planes(self) -> int:
        return (2 * self.workers).bit_length()

    def __call__(self, ballots: Tensor, first_word: int, t: int) -> Tensor:
        verdict: Tensor = self.kernels.tally_count_ternary(ballots, self.verdict_planes)
        return verdict


@dataclass(frozen=True)
class Total:
    """The sum of full-precision numbers."""

    ballot_planes = 1
    verdict_planes = 1

    def __call__(self, ballots: Tensor, first_word: int, t: int) -> Tensor:
        return in_rank_order(ballots, Tensor.add_)


@dataclass(frozen=True)
class Relay:
    """Nothing is counted: back come the voters' own ballots, followed by blanks in the place of absent ones."""

    workers: int
    ballot_planes: int

    @property
    def verdict_planes(self) -> int:
        return self.workers * self.ballot_planes

    def __call__(self, ballots: Tensor, first_word: int, t: int) -> Tensor:
        verdict = ballots.new_zeros(self.verdict_planes, ballots.shape[2])
        verdict[: ballots.shape[0] * self.ballot_planes] = ballots.flatten(0, 1)
        return verdict


class Observer(Protocol):
    """Looks at ballots and their verdict while they are there.

    Attributes:
        voters: the ranks of the ballots that come, in their order; or bool[workers], where those of all come.
    """

    voters: Any

    def take(self, ballots: Tensor, verdict: Tensor, first: int) -> None:
        """T[voters, planes, n] and T[planes, n] of a shard that starts at word `first` of its bucket."""


@dataclass(frozen=True)
class Tally:
    """The counting of one bucket: who may vote, and what they decided.

    Attributes:
        counting: the pure function.
        own: this worker's ballot header, for the fields that all must share.
        first_word, shard_words: where the bucket starts in the layout, and how long a shard is.
        observer: is shown the ballots and what they decide, in the few steps that somebody looks at them.
    """

    counting: Count
    own: BallotHeader
    first_word: int
    shard_words: int
    observer: Observer | None = None

    @property
    def verdict_planes(self) -> int:
        return self.counting.verdict_planes

    def judge(self, headers: Tensor) -> tuple[Tensor, list[int]]:
        rows: Sequence[Sequence[int]] = headers.tolist()
        verdict, voters = judge([BallotHeader.decode(row) for row in rows], self.own)
        if self.observer is not None:
            self.observer.voters = voters
        return verdict.encode().to(headers.device), voters

    def count(self, ballots: Tensor, voters: list[int], shard: int) -> Tensor:
        width = ballots.shape[1]
        if not voters:
            return ballots.new_zeros(self.width(width))
        if len(voters) < len(ballots):
            ballots = ballots[voters]
        planes = ballots.view(len(ballots), self.counting.ballot_planes, width // self.counting.ballot_planes)
        first_word = self.first_word + shard * self.shard_words
        verdict = self.counting(planes, first_word, self.own.t)
        if self.observer is not None:
            self.observer.take(planes, verdict, shard * self.shard_words)
        return verdict.reshape(-1)

    def width(self, ballot_width: int) -> int:
        return ballot_width // self.counting.ballot_planes * self.counting.verdict_planes
