"""What the network itself takes: the rows of one vote and nothing else, and calls that carry next to nothing."""

import statistics
import time

import torch
from torch import nn

import dlion
from dlion.channel import Channel, nbytes
from dlion.header import NBYTES
from dlion.layout import WORD, Layout
from dlion.train.bench.turns import Turns
from dlion.train.ranks import Ranks
from dlion.voting import voting_groups

LATENCY_CALLS = 3


class BareExchange:
    """The calls of one vote of dlion with rows of the same lengths, over dlion's own groups.

    Attributes:
        payload: bytes that each worker sends.
        calls: collective calls.
        seconds: of each time it was run, the slowest rank's.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, vote: str) -> None:
        # the optimizer never steps: it knows the length of a bucket
        options = dlion.DistributedLion(model.parameters(), vote=vote).options
        bucket_bytes = options.bucket_on(ranks.device)
        buckets = Layout.of([{"params": list(model.parameters())}], bucket_bytes * 8, WORD).buckets
        self._groups = voting_groups(ranks.channel.group, None)
        size = self._groups.ballots.size
        planes = 1 if vote == "majority" else size.bit_length()  # ceil(log2(size + 1))
        self._calls: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for bucket in buckets:
            if size == 2:  # "replicated": everybody gets all ballots
                self._calls.append((self._row(bucket.words), None))
                continue
            words = -(-bucket.words // size)
            self._calls.append((self._row(words).expand(size, -1).contiguous(), self._row(planes * words)))
        own = [ballots if verdict is None else ballots[0] for ballots, verdict in self._calls]
        answers = [verdict for _, verdict in self._calls if verdict is not None]
        self.payload = (size - 1) * sum(map(nbytes, [*own, *answers]))
        self.calls = len(own) + len(answers)
        self.seconds: list[float] = []

    def turn(self, turns: Turns) -> None:
        """Run it once, all ranks together."""
        self._groups.ballots.barrier()
        started = time.perf_counter()
        for ballots, verdict in self._calls:
            if verdict is None:
                self._groups.ballots.all_gather(ballots).wait()
            else:
                self._groups.ballots.all_to_all(ballots).wait()
                self._groups.verdicts.all_gather(verdict).wait()
        self.seconds.append(turns.timed(time.perf_counter() - started))

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    def _row(self, words: int) -> torch.Tensor:
        return torch.zeros(NBYTES // 8 + words, dtype=torch.int64, device=self._groups.ballots.device)


class Latencies:
    """Seconds of calls that carry 8 bytes: an all-reduce as DDP makes them, and one of the two calls of a vote."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._row = torch.zeros(1, dtype=torch.int64, device=channel.device)
        self._rows = torch.zeros((channel.size, 1), dtype=torch.int64, device=channel.device)
        self._all_reduces: list[float] = []
        self._votes: list[float] = []

    def turn(self, turns: Turns) -> None:
        """Make some of these calls, all ranks together."""
        for _ in range(LATENCY_CALLS):
            self._channel.barrier()
            started = time.perf_counter()
            self._channel.sum_(self._row).wait()
            between = time.perf_counter()
            self._channel.all_to_all(self._rows).wait()
            self._channel.all_gather(self._row).wait()
            self._all_reduces.append(between - started)
            self._votes.append((time.perf_counter() - between) / 2)
        turns.timed(0.0)

    def medians(self) -> dict[str, float]:
        """Of this rank."""
        return {"all_reduce": statistics.median(self._all_reduces), "vote_call": statistics.median(self._votes)}
