"""Who talks to whom.

A topology takes a worker's ballots and returns every shard's verdict. Bytes are only transported; the one exception,
AllReduce, sums full-precision gradients for the global methods.

A consultation is a generator: it yields each call that it needs to be over, and returns the verdict headers
i64[owners, 2] and the verdict T'[planes', n]. It never waits itself, so that many buckets can travel at once, and lets
go of every buffer as soon as it can. The first call runs on the group for ballots, a second on the one for verdicts.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from dlion.channel import nbytes
from dlion.header import WORDS
from dlion.layout import from_shards, into_shards
from dlion.stats import Stats

REPLICATED_WORDS = 1024  # up to here one call with all ballots is quicker than two with shards

Result = TypeVar("Result", covariant=True)


class Awaited(Protocol[Result]):
    """A call under way."""

    @property
    def result(self) -> Result:
        """What it brings, once it is over."""

    def arrived(self) -> bool:
        """Whether it is."""

    def wait(self) -> Result:
        """The result, once it is there."""


class Line(Protocol):
    """What a topology needs of a channel, between processes or within one."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_to_all(self, rows: Tensor) -> Awaited[Tensor]: ...
    def all_gather(self, row: Tensor) -> Awaited[Tensor]: ...
    def gather(self, row: Tensor, to: int) -> Awaited[Tensor | None]: ...
    def send_out(self, row: Tensor, source: int) -> Awaited[Tensor]: ...
    def sum_(self, tensor: Tensor) -> Awaited[Tensor]: ...


class Lines(Protocol):
    """One for ballots and one for verdicts, so that they do not wait for each other."""

    @property
    def ballots(self) -> Line: ...
    @property
    def verdicts(self) -> Line: ...


Consultation = Generator[Awaited[Any], None, tuple[Tensor, Tensor]]


class Tally(Protocol):
    """What a topology needs to know of the counting."""

    @property
    def verdict_planes(self) -> int:
        """Planes of a verdict."""

    def judge(self, headers: Tensor) -> tuple[Tensor, list[int]]:
        """i64[workers, 2] -> the verdict's header i64[2], and the ranks whose ballots count."""

    def count(self, ballots: Tensor, shard: int) -> Tensor:
        """T[voters, width] -> T[width']: the ballots of one shard that count, to its verdict."""

    def width(self, ballot_width: int) -> int:
        """Length of the verdict that answers ballots of this length."""


class Topology(Protocol):
    """Who talks to whom."""

    @property
    def shards(self) -> int:
        """Into how many equal parts a bucket is cut."""

    def consult(self, header: Tensor, planes: Tensor, tally: Tally) -> Consultation:
        """Exchange a bucket.

        Args:
            header: i64[2], this worker's ballot header.
            planes: T[planes, n], its encoded message.
            tally: the counting.
        """


class Solo:
    """One worker: nobody to talk to."""

    shards = 1

    def consult(self, header: Tensor, planes: Tensor, tally: Tally) -> Consultation:
        verdict, voters = tally.judge(header[None])
        counted = tally.count(planes.reshape(1, -1)[voters], 0)
        return verdict[None], counted.view(tally.verdict_planes, -1)
        yield  # a generator, though there is nothing to wait for


@dataclass(frozen=True)
class Sharded:
    """All-to-all of ballots, all-gather of verdicts: every worker is the server of one shard."""

    voting: Lines
    stats: Stats

    @property
    def shards(self) -> int:
        return self.voting.ballots.size

    def consult(self, header: Tensor, planes: Tensor, tally: Tally) -> Consultation:
        ballots, verdicts = self.voting.ballots, self.voting.verdicts
        length = planes.shape[1]
        rows = into_shards(header, planes, self.shards)
        del planes
        self.stats.moved(*[(ballots.size - 1) * nbytes(rows[0])] * 2)
        call = ballots.all_to_all(rows)
        yield call
        verdict = _row(*_tallied(call.result, tally, ballots.rank))
        del rows, call
        self.stats.moved(*[(ballots.size - 1) * nbytes(verdict)] * 2)
        call = verdicts.all_gather(verdict)
        yield call
        rows = call.result
        del verdict, call
        return _verdict(rows, tally, length)


@dataclass(frozen=True)
class Replicated:
    """All-gather of ballots: everybody counts everything. One call, but traffic grows with the number of workers."""

    voting: Lines
    stats: Stats
    shards = 1

    def consult(self, header: Tensor, planes: Tensor, tally: Tally) -> Consultation:
        ballots = self.voting.ballots
        row = into_shards(header, planes, 1)[0]
        del planes
        self.stats.moved(*[(ballots.size - 1) * nbytes(row)] * 2)
        call = ballots.all_gather(row)
        yield call
        verdict, counted = _tallied(call.result, tally, 0)
        return verdict[None], counted.view(tally.verdict_planes, -1)


@dataclass(frozen=True)
class Server:
    """Ballots to rank 0, which counts and answers everybody: the paper's drawing.

    The answer leaves rank 0 once for each worker, directly, so that its load is the drawing's too.
    """

    voting: Lines
    stats: Stats
    shards = 1

    def consult(self, header: Tensor, planes: Tensor, tally: Tally) -> Consultation:
        ballots, verdicts = self.voting.ballots, self.voting.verdicts
        length, others = planes.shape[1], ballots.size - 1
        row = into_shards(header, planes, 1)[0]
        del planes
        gathering = ballots.gather(row, to=0)
        yield gathering
        if gathering.result is not None:
            self.stats.moved(0, others * nbytes(row))
            verdict = _row(*_tallied(gathering.result, tally, 0))
            self.stats.moved(others * nbytes(verdict), 0)
        else:
            self.stats.moved(nbytes(row), 0)
            verdict = row.new_empty(header.numel() + tally.width(row.numel() - header.numel()))
            self.stats.moved(0, nbytes(verdict))
        del gathering, row
        call = verdicts.send_out(verdict, source=0)
        yield call
        del verdict
        return _verdict(call.result[None], tally, length)


@dataclass(frozen=True)
class AllReduce:
    """Full-precision numbers, summed by the backend; headers are gathered first, so that absent votes count nothing."""

    voting: Lines
    stats: Stats
    shards = 1

    def consult(self, header: Tensor, planes: Tensor, tally: Tally) -> Consultation:
        ballots = self.voting.ballots
        self.stats.moved(*[(ballots.size - 1) * nbytes(header)] * 2)
        call = ballots.all_gather(header)
        yield call
        verdict, voters = tally.judge(call.result)
        total = planes if ballots.rank in voters else torch.zeros_like(planes)
        if voters and planes.numel():
            # what a ring all-reduce moves; the backend may choose another way
            self.stats.moved(*[2 * (ballots.size - 1) * nbytes(planes) // ballots.size] * 2)
            yield self.voting.verdicts.sum_(total)
        return verdict[None], total


def choose_topology(name: str, voting: Lines | None, stats: Stats, words: int, *, summed: bool) -> Topology:
    """The topology of this name; "auto" replicates ballots between two workers and for few words, else shards them.

    Args:
        voting: None for one worker alone.
        words: of the whole layout.
        summed: whether messages are full-precision numbers, for which the backend has its own way.
    """
    if voting is None:
        return Solo()
    if summed:
        return AllReduce(voting, stats)
    if name == "auto":
        name = "replicated" if voting.ballots.size == 2 or words <= REPLICATED_WORDS else "sharded"
    if name == "sharded":
        return Sharded(voting, stats)
    return Replicated(voting, stats) if name == "replicated" else Server(voting, stats)


def _tallied(rows: Tensor, tally: Tally, shard: int) -> tuple[Tensor, Tensor]:
    """The header and the words of a shard's verdict."""
    header, voters = tally.judge(rows[:, :WORDS])
    ballots = rows[:, WORDS:] if len(voters) == len(rows) else rows[voters, WORDS:]
    return header, tally.count(ballots, shard)


def _row(header: Tensor, words: Tensor) -> Tensor:
    return torch.cat([header, words])


def _verdict(rows: Tensor, tally: Tally, length: int) -> tuple[Tensor, Tensor]:
    return rows[:, :WORDS].clone(), from_shards(rows[:, WORDS:], tally.verdict_planes, length)
