"""Buckets under way: sent in one order by all workers, received in the same order."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dlion.header import Status
from dlion.layout import Bucket
from dlion.lines import Awaited
from dlion.phases import Phases
from dlion.topology import Consultation


@dataclass
class UnderWay:
    """One bucket that is being consulted about, and what this worker said of it."""

    bucket: Bucket
    status: Status
    consultation: Consultation
    call: Awaited[Any] | None = None
    calls: int = 0
    result: tuple[Tensor, Tensor] | None = None

    @property
    def awaits_ballots(self) -> bool:
        """Whether the others' ballots, and not yet the verdicts, are what it waits for."""
        return self.call is not None and self.calls == 1

    def resume(self) -> None:
        """Let the consultation run up to its next call or its end."""
        self.call = None  # it holds the tensors that travelled
        try:
            self.call = next(self.consultation)
            self.calls += 1
        except StopIteration as end:
            self.result = end.value


class Flight:
    """All buckets of a step that are under way, oldest first.

    Every group sees its calls in the same order on all workers: bucket after bucket on the group for ballots, and the
    same on the group for verdicts, whatever arrives first.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._under_way: deque[UnderWay] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def clear(self) -> None:
        """Forget what is under way: the step failed."""
        self._under_way.clear()

    def send(self, bucket: Bucket, status: Status, consultation: Consultation) -> None:
        """Let the ballots of a bucket leave."""
        consulted = UnderWay(bucket, status, consultation)
        consulted.resume()
        self._under_way.append(consulted)

    def advance(self) -> None:
        """Let everything go on that need not wait: count ballots that have arrived, let verdicts leave."""
        for consulted in self._under_way:
            while consulted.call is not None and consulted.call.arrived():
                self._go_on(consulted)
            if consulted.awaits_ballots:
                break  # later verdicts must not overtake this one

    def count(self, but: int = 0) -> None:
        """Wait for ballots under way, `but` the newest so many buckets', count them, and let their verdicts leave.

        Raises:
            ExchangeError: another worker was lost.
        """
        for consulted in list(self._under_way)[: len(self._under_way) - but]:
            if consulted.awaits_ballots:
                self._go_on(consulted)

    def receive(self) -> UnderWay:
        """The oldest bucket, with its result.

        Raises:
            ExchangeError: another worker was lost.
        """
        self.count()  # all ballots first: every verdict that leaves now travels while others wait
        oldest = self._under_way[0]
        while oldest.call is not None:
            self._go_on(oldest)
        return self._under_way.popleft()

    def _go_on(self, consulted: UnderWay) -> None:
        assert consulted.call is not None
        with self._phases("wait"):
            consulted.call.wait()
        with self._phases("tally"):
            consulted.resume()
