"""All workers of a simulation at one table: what a channel does between processes, done between generators.

The topologies run as they are, one generator for each worker, side by side: so the rows, their bytes and their counting
are those of real workers, and nothing about them is written twice.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dlion.lines import Awaited
from dlion.topology import Tally

Result = TypeVar("Result")
Answer = Callable[[list[Tensor]], Sequence[Tensor | None]]


@dataclass(eq=False)
class Waiting:
    """One worker's part in a call that is over when all have made theirs: an `Awaited`."""

    given: Tensor
    answer: Answer
    result: Any = None
    served: bool = False

    def arrived(self) -> bool:
        return self.served

    def wait(self) -> Any:
        return self.result


@dataclass(eq=False)
class Table:
    """Where `size` workers meet."""

    size: int
    _calls: list[Waiting] = field(default_factory=list)

    def call(self, given: Tensor, answer: Answer) -> Waiting:
        """Take part in the call at hand; workers come in rank order."""
        self._calls.append(Waiting(given, answer))
        return self._calls[-1]

    def serve(self) -> None:
        """Give every worker the answer to the call that all have made."""
        calls, self._calls = self._calls, []
        assert len(calls) == self.size, "every worker makes the same calls"
        for call, result in zip(calls, calls[0].answer([call.given for call in calls]), strict=True):
            call.result, call.served = result, True


@dataclass(frozen=True)
class Seat:
    """One worker's place at the table: a `Line`."""

    table: Table
    rank: int

    @property
    def size(self) -> int:
        return self.table.size

    def all_to_all(self, rows: Tensor) -> Waiting:
        """Row j goes to worker j."""
        return self.table.call(rows, lambda given: torch.stack(given, 1).unbind(0))

    def all_gather(self, row: Tensor) -> Waiting:
        """Every worker's row to everybody: one tensor for all."""
        return self.table.call(row, lambda given: [torch.stack(given)] * self.size)

    def gather(self, row: Tensor, to: int) -> Waiting:
        """Every worker's row to worker `to`."""
        return self.table.call(
            row, lambda given: [torch.stack(given) if rank == to else None for rank in range(self.size)]
        )

    def send_out(self, row: Tensor, source: int) -> Waiting:
        """The row of worker `source` to everybody."""
        return self.table.call(row, lambda given: [given[source]] * self.size)


@dataclass(frozen=True)
class Lines:
    """A worker's two lines; at a table they can be one."""

    ballots: Seat
    verdicts: Seat


class SharedTally:
    """The counting of one bucket, done once for all workers: each of them would come to the same from the same rows."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._judged: tuple[Tensor, list[int]] | None = None
        self._counted: dict[int, Tensor] = {}

    @property
    def verdict_planes(self) -> int:
        return self._tally.verdict_planes

    def judge(self, headers: Tensor) -> tuple[Tensor, list[int]]:
        if self._judged is None:
            self._judged = self._tally.judge(headers)
        return self._judged

    def count(self, ballots: Tensor, voters: list[int], shard: int) -> Tensor:
        if shard not in self._counted:
            self._counted[shard] = self._tally.count(ballots, voters, shard)
        return self._counted[shard]

    def width(self, ballot_width: int) -> int:
        return self._tally.width(ballot_width)


def side_by_side(consultations: list[Generator[Awaited[Any], None, Result]], table: Table) -> Result:
    """Run all workers' consultations, call by call; the result of the first, which is everybody's."""
    while True:
        for consultation in consultations:
            try:
                next(consultation)
            except StopIteration as end:
                result: Result = end.value
                return result
        table.serve()
