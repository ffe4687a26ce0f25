"""What the network itself takes: the rows of one vote and nothing else, and calls that carry next to nothing."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import dlion
from dlion.channel import nbytes, voting_groups
from dlion.header import WORDS
from dlion.layout import WORD, Layout
from dlion.train.bench.turns import Table
from dlion.train.ranks import Ranks

LATENCY_CALLS = 9


class BareExchange:
    """The calls of one vote of dlion with rows of the same lengths, over dlion's own groups.

    Attributes:
        payload: bytes that each worker sends.
        calls: collective calls.
        seconds: of each time it was run, the slowest rank's.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, vote: str) -> None:
        # the optimizer never steps: it knows the length of a bucket
        bucket_bytes = dlion.DistributedLion(model.parameters(), vote=vote).options.bucket_bytes
        buckets = Layout.of([{"params": list(model.parameters())}], bucket_bytes * 8, WORD).buckets
        self._voting = voting_groups(ranks.channel.group, None)
        size = self._voting.ballots.size
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

    def turn(self, table: Table) -> None:
        """Run it once, all ranks together."""
        self._voting.ballots.barrier()
        started = time.perf_counter()
        for ballots, verdict in self._calls:
            if verdict is None:
                self._voting.ballots.all_gather(ballots)
            else:
                self._voting.ballots.all_to_all(ballots)
                self._voting.verdicts.all_gather(verdict)
        self.seconds.append(table.timed(time.perf_counter() - started))

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    def _row(self, words: int) -> torch.Tensor:
        return torch.zeros(WORDS + words, dtype=torch.int64, device=self._voting.ballots.device)


def latencies(ranks: Ranks, table: Table) -> dict[str, float]:
    """Seconds of a call that carries 8 bytes: an all-reduce as DDP makes them, and one of the two calls of a vote."""
    channel = ranks.channel
    tiny = torch.zeros(1, dtype=torch.int64, device=channel.device)
    rows = torch.zeros((channel.size, 1), dtype=torch.int64, device=channel.device)

    def exchange() -> None:
        channel.all_to_all(rows)
        channel.all_gather(tiny)

    return {
        "all_reduce": _median_seconds(lambda: channel.sum_(tiny), table),
        "vote_call": _median_seconds(exchange, table) / 2,
    }


def _median_seconds(call: Callable[[], object], table: Table) -> float:
    call()
    times = []
    for _ in range(LATENCY_CALLS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return table.timed(statistics.median(times))
