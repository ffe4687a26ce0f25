"""Who talks to whom.

A topology takes a worker's ballots, one row for each shard, and returns every shard's verdict row. Bytes are only
transported; the one exception, AllReduce, sums full-precision gradients for the global methods.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dlion.channel import Voting, nbytes
from dlion.header import WORDS
from dlion.stats import Stats


class Tally(Protocol):
    """What a topology needs to know of the counting."""

    def judge(self, headers: Tensor) -> tuple[Tensor, list[int]]:
        """i64[workers, 2] -> the verdict's header i64[2], and the ranks whose ballots count."""

    def count(self, ballots: Tensor, shard: int) -> Tensor:
        """T[voters, width] -> T'[width']: the ballots of one shard that count, to its verdict."""

    def width(self, ballot_width: int) -> int:
        """Length of the verdict that answers ballots of this length."""


class Topology(Protocol):
    """Who talks to whom."""

    @property
    def shards(self) -> int:
        """Into how many equal parts a bucket is cut."""

    def consult(self, header: Tensor, payload: Tensor, tally: Tally) -> tuple[Tensor, Tensor]:
        """Exchange a bucket.

        Args:
            header: i64[2], this worker's ballot header.
            payload: T[shards, width], its encoded message.
            tally: the counting.

        Returns:
            Verdict headers i64[owners, 2] and verdicts T'[shards, width'], equal on every worker.
        """


class Solo:
    """One worker: nobody to talk to."""

    shards = 1

    def consult(self, header: Tensor, payload: Tensor, tally: Tally) -> tuple[Tensor, Tensor]:
        verdict, voters = tally.judge(header[None])
        return verdict[None], tally.count(payload[voters], 0)[None]


@dataclass(frozen=True)
class Sharded:
    """All-to-all of ballots, all-gather of verdicts: every worker is the server of one shard."""

    voting: Voting
    stats: Stats

    @property
    def shards(self) -> int:
        return self.voting.ballots.size

    def consult(self, header: Tensor, payload: Tensor, tally: Tally) -> tuple[Tensor, Tensor]:
        ballots, verdicts = self.voting.ballots, self.voting.verdicts
        rows = ballots.all_to_all(_rows(header, payload))
        self.stats.moved(*[(ballots.size - 1) * nbytes(rows[0])] * 2)
        verdict = _tallied(rows, tally, ballots.rank)
        self.stats.moved(*[(ballots.size - 1) * nbytes(verdict)] * 2)
        return _split(verdicts.all_gather(verdict))


@dataclass(frozen=True)
class Replicated:
    """All-gather of ballots: everybody counts everything. One call, but traffic grows with the number of workers."""

    voting: Voting
    stats: Stats
    shards = 1

    def consult(self, header: Tensor, payload: Tensor, tally: Tally) -> tuple[Tensor, Tensor]:
        ballots = self.voting.ballots
        rows = ballots.all_gather(_rows(header, payload)[0])
        self.stats.moved(*[(ballots.size - 1) * nbytes(rows[0])] * 2)
        return _split(_tallied(rows, tally, 0)[None])


@dataclass(frozen=True)
class Server:
    """Ballots to rank 0, which counts and answers everybody: the paper's drawing.

    The answer leaves rank 0 once for each worker, directly, so that its load is the drawing's too.
    """

    voting: Voting
    stats: Stats
    shards = 1

    def consult(self, header: Tensor, payload: Tensor, tally: Tally) -> tuple[Tensor, Tensor]:
        ballots, verdicts = self.voting.ballots, self.voting.verdicts
        row = _rows(header, payload)[0]
        rows = ballots.gather(row, to=0)
        others = ballots.size - 1
        if rows is not None:
            self.stats.moved(0, others * nbytes(row))
            verdict = _tallied(rows, tally, 0)
            self.stats.moved(others * nbytes(verdict), 0)
        else:
            self.stats.moved(nbytes(row), 0)
            verdict = row.new_empty(header.numel() + tally.width(payload.shape[1]))
            self.stats.moved(0, nbytes(verdict))
        return _split(verdicts.send_out(verdict, source=0)[None])


@dataclass(frozen=True)
class AllReduce:
    """Full-precision numbers, summed by the backend; headers are gathered first, so that absent votes count nothing."""

    voting: Voting
    stats: Stats
    shards = 1

    def consult(self, header: Tensor, payload: Tensor, tally: Tally) -> tuple[Tensor, Tensor]:
        ballots = self.voting.ballots
        headers = ballots.all_gather(header)
        self.stats.moved(*[(ballots.size - 1) * nbytes(header)] * 2)
        verdict, voters = tally.judge(headers)
        total = payload if ballots.rank in voters else torch.zeros_like(payload)
        if voters and payload.numel():
            self.voting.verdicts.sum_(total)
            # what a ring all-reduce moves; the backend may choose another way
            self.stats.moved(*[2 * (ballots.size - 1) * nbytes(payload) // ballots.size] * 2)
        return verdict[None], total


def _tallied(rows: Tensor, tally: Tally, shard: int) -> Tensor:
    headers, ballots = _split(rows)
    header, voters = tally.judge(headers)
    return torch.cat([header, tally.count(ballots[voters], shard)])


def _rows(header: Tensor, payload: Tensor) -> Tensor:
    return torch.cat([header.expand(payload.shape[0], -1), payload], dim=1)


def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :WORDS], rows[:, WORDS:]
