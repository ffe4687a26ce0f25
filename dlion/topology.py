"""Who talks to whom.

A topology takes a worker's ballots and returns every shard's verdict. Bytes are only transported, numbers of full
precision as well: their sum is a tally like any other, so that its bits do not depend on the network library.

A consultation is a generator: it yields each call that it needs to be over, and returns the verdict headers
i64[owners, 2] and the verdict T'[planes', n]. It never waits itself, so that many buckets can travel at once, and lets
go of every buffer as soon as it can. The first call runs on the group for ballots, a second on the one for verdicts.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dlion.channel import nbytes
from dlion.header import NBYTES
from dlion.layout import from_shards, into_shards
from dlion.lines import Awaited, Lines
from dlion.stats import Stats

TOPOLOGIES = ("auto", "sharded", "replicated", "server")

REPLICATED_WORDS = 1024  # up to here one call with all ballots is quicker than two with shards

Consultation = Generator[Awaited[Any], None, tuple[Tensor, Tensor]]

Replicate = Callable[[int, int], bool]  # (workers, words of the layout) -> whether "auto" replicates ballots


def when_small(workers: int, words: int) -> bool:
    """Ballots of bits: one call costs no more bytes between two workers, and less time where bytes are few."""
    return workers == 2 or words <= REPLICATED_WORDS


def between_two(workers: int, words: int) -> bool:
    """Ballots of whole numbers: only where no byte more is sent."""
    return workers == 2


def always(workers: int, words: int) -> bool:
    """Ballots that no worker can count a part of."""
    return True


class Tally(Protocol):
    """What a topology needs to know of the counting."""

    @property
    def verdict_planes(self) -> int:
        """Planes of a verdict."""

    def judge(self, headers: Tensor) -> tuple[Tensor, Any]:
        """i64[workers, 2] -> the verdict's header i64[2], and whose ballots count, in a form that `count` knows."""

    def count(self, ballots: Tensor, voters: Any, shard: int) -> Tensor:
        """T[workers, width] -> T[width']: the ballots of one shard to its verdict; `voters` are `judge`'s."""

    def width(self, ballot_width: int) -> int:
        """Length of the verdict that answers ballots of this length."""


class Topology(Protocol):
    """Who talks to whom.

    Attributes:
        tallied_by_all: whether every worker counts all ballots itself, so that nobody must tell what it saw in them.
    """

    @property
    def tallied_by_all(self) -> bool: ...

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
    tallied_by_all = True

    def consult(self, header: Tensor, planes: Tensor, tally: Tally) -> Consultation:
        verdict, voters = tally.judge(header[None])
        counted = tally.count(planes.reshape(1, -1), voters, 0)
        return verdict[None], counted.view(tally.verdict_planes, -1)
        yield  # a generator, though there is nothing to wait for


@dataclass(frozen=True)
class Sharded:
    """All-to-all of ballots, all-gather of verdicts: every worker is the server of one shard."""

    voting: Lines
    stats: Stats
    tallied_by_all = False

    @property
    def shards(self) -> int:
        return self.voting.ballots.size

    def consult(self, header: Tensor, planes: Tensor, tally: Tally) -> Consultation:
        ballots, verdicts = self.voting.ballots, self.voting.verdicts
        length = planes.shape[1]
        rows = into_shards(header.view(planes.dtype), planes, self.shards)
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
    tallied_by_all = True

    def consult(self, header: Tensor, planes: Tensor, tally: Tally) -> Consultation:
        ballots = self.voting.ballots
        row = into_shards(header.view(planes.dtype), planes, 1)[0]
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
    tallied_by_all = False

    def consult(self, header: Tensor, planes: Tensor, tally: Tally) -> Consultation:
        ballots, verdicts = self.voting.ballots, self.voting.verdicts
        length, others = planes.shape[1], ballots.size - 1
        row = into_shards(header.view(planes.dtype), planes, 1)[0]
        del planes
        gathering = ballots.gather(row, to=0)
        yield gathering
        if gathering.result is not None:
            self.stats.moved(0, others * nbytes(row))
            verdict = _row(*_tallied(gathering.result, tally, 0))
            self.stats.moved(others * nbytes(verdict), 0)
        else:
            self.stats.moved(nbytes(row), 0)
            width = NBYTES // row.element_size()
            verdict = row.new_empty(width + tally.width(row.numel() - width))
            self.stats.moved(0, nbytes(verdict))
        del gathering, row
        call = verdicts.send_out(verdict, source=0)
        yield call
        del verdict
        return _verdict(call.result[None], tally, length)


def choose_topology(name: str, voting: Lines | None, stats: Stats, words: int, replicate: Replicate) -> Topology:
    """The topology of this name; "auto" replicates ballots where `replicate` says so, else shards them.

    Args:
        voting: None for one worker alone.
        words: of the whole layout.
    """
    if voting is None:
        return Solo()
    if name == "auto":
        name = "replicated" if replicate(voting.ballots.size, words) else "sharded"
    if name == "sharded":
        return Sharded(voting, stats)
    return Replicated(voting, stats) if name == "replicated" else Server(voting, stats)


def _tallied(rows: Tensor, tally: Tally, shard: int) -> tuple[Tensor, Tensor]:
    """The header and the words of a shard's verdict."""
    headers, ballots = _parted(rows)
    header, voters = tally.judge(headers)
    return header, tally.count(ballots, voters, shard)


def _row(header: Tensor, verdict: Tensor) -> Tensor:
    return torch.cat([header.view(verdict.dtype), verdict])


def _verdict(rows: Tensor, tally: Tally, length: int) -> tuple[Tensor, Tensor]:
    headers, verdicts = _parted(rows)
    headers = headers.clone()  # or it would hold all of the rows
    return headers, from_shards(verdicts, tally.verdict_planes, length)


def _parted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The headers i64[n, 2], and what is behind them. Headers before words are read where they lie."""
    width = NBYTES // rows.element_size()
    headers = rows[:, :width]
    if rows.dtype != torch.int64:
        headers = headers.clone(memory_format=torch.contiguous_format).view(torch.int64)
    return headers, rows[:, width:]
