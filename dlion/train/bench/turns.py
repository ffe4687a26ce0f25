"""A contender's turn: a few steps, timed on every rank and agreed on by all of them."""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dlion.train.bench.contenders import Contender, Parts
from dlion.train.bench.interface import Interface
from dlion.train.ranks import Ranks


class Stopped(Exception):
    """A signal ended the measurement, on every rank after the same turn."""


@dataclass
class Record:
    """What was measured of one contender: seconds that all ranks agree on, and bytes of this rank.

    Attributes:
        steps: seconds of each step, the slowest rank's.
        turns: seconds of each turn's median step, the slowest rank's.
        parts: seconds of the parts of each turn's mean step, mean over ranks.
        sent, interface_sent, interface_received: this rank's bytes per step, one figure a turn; empty where unknown.
        phases: seconds of each turn's mean step, mean over ranks; empty for contenders without them.
    """

    steps: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)
    parts: list[Parts] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    interface_sent: list[float] = field(default_factory=list)
    interface_received: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median(self.steps)

    @property
    def part_medians(self) -> Parts:
        """Median over the turns of each part of a step."""
        return Parts(*map(statistics.median, zip(*self.parts, strict=True)))

    @property
    def phase_medians(self) -> dict[str, float]:
        """Median over the turns of each phase."""
        names = self.phases[0] if self.phases else {}
        return {name: statistics.median(turn[name] for turn in self.phases) for name in names}


class Turns:
    """Where contenders take their turns, all ranks together.

    Attributes:
        elapsed: seconds since it was made, the same number on all ranks.
    """

    def __init__(self, ranks: Ranks, batch: Tensor, interface: Interface | None) -> None:
        self._ranks = ranks
        self._batch = batch
        self._interface = interface
        self._started = time.monotonic()
        self._turns = 0
        self.elapsed = 0.0

    def turn(self, contender: Contender, steps: int, record: Record) -> None:
        """Let `contender` take `steps` steps, and add what they took to `record`.

        Raises:
            Stopped: on every rank after the same turn, when a signal came to one of them.
        """
        channel = self._ranks.channel
        voter = contender.voter
        sent = voter.stats.bytes_sent if voter is not None else 0
        before = self._read()
        channel.barrier()  # nobody's first step is counted before everybody has read
        if voter is not None:
            voter.phases.start()
        taken = [contender.step(self._batch) for _ in range(steps)]
        channel.barrier()
        after = self._read()
        spent = None
        if voter is not None:
            record.sent.append((voter.stats.bytes_sent - sent) / steps)
            spent = {name: seconds / steps for name, seconds in voter.phases.seconds.items()}
        if self._interface is not None:
            moved = [(new - old) / steps / self._interface.shared_by for new, old in zip(after, before, strict=True)]
            record.interface_sent.append(moved[0])
            record.interface_received.append(moved[1])
        self._agree(taken, spent, record)

    def timed(self, seconds: float) -> float:
        """The longest of all ranks' `seconds`, for what takes a turn beside the contenders."""
        return float(max(fact["seconds"] for fact in self._gather({"seconds": seconds})))

    def _agree(self, taken: list[Parts], phases: dict[str, float] | None, record: Record) -> None:
        facts = self._gather({"steps": taken, "phases": phases})
        taken_by_rank = [[Parts(*step) for step in fact["steps"]] for fact in facts]
        slowest = [max(one.whole for one in step) for step in zip(*taken_by_rank, strict=True)]
        record.steps += slowest
        record.turns.append(statistics.median(slowest))
        every = [step for steps in taken_by_rank for step in steps]
        record.parts.append(Parts(*map(statistics.fmean, zip(*every, strict=True))))
        if phases is not None:
            spent = [fact["phases"] for fact in facts]
            record.phases.append({name: statistics.fmean(one[name] for one in spent) for name in phases})

    def _gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        mine["elapsed"] = time.monotonic() - self._started
        facts = self._ranks.channel.gather_json(mine)
        self.elapsed = max(fact["elapsed"] for fact in facts)
        self._turns += 1
        if self._ranks.stop.reached(self._turns):
            raise Stopped
        return facts

    def _read(self) -> tuple[int, int]:
        if self._interface is None:
            return 0, 0
        return self._interface.read()
