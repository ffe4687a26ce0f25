"""Runs cells, several at once if asked for, until all are recorded, the time is up, or a signal comes."""

import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from dlion.train.compare.attempt import Attempt, CellError
from dlion.train.compare.cells import Cell
from dlion.train.compare.folder import Comparable, Record, StudyFolder, record_of
from dlion.train.compare.screen import Screen
from dlion.train.ranks import SIGNALS

POLL_SECONDS = 0.1


class Stop:
    """Set by a signal or by the end of the time; a second signal wants everything to end at once."""

    def __init__(self, deadline: float | None) -> None:
        self.signal = 0
        self.at_once = False
        self._deadline = deadline

    def received(self, number: int, _: FrameType | None) -> None:
        """Handles a signal."""
        self.at_once = self.signal != 0
        self.signal = number

    @property
    def time_is_up(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def asked(self) -> bool:
        """Whether to end."""
        return self.signal != 0 or self.time_is_up


@contextmanager
def listening(deadline: float | None) -> Iterator[Stop]:
    """Listen to signals as long as the context lasts."""
    stop = Stop(deadline)
    previous = {number: signal.signal(number, stop.received) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass
class Schedule:
    """Runs cells and records them.

    epoch_steps: steps of an epoch of a cell.
    """

    folder: StudyFolder
    records: dict[str, Record]
    comparable: Comparable
    jobs: int
    stop: Stop
    screen: Screen
    epoch_steps: Callable[[Cell], int]
    errors: dict[str, str] = field(default_factory=dict)

    def run(self, cells: Sequence[Cell]) -> None:
        """Run what is not recorded yet. What crashes is told, kept in `errors`, and does not stop the others.

        Raises:
            ValueError: a cell cannot be compared with those of the folder.
        """
        todo = [cell for cell in cells if cell.key not in self.records and cell.key not in self.errors]
        active: list[Attempt] = []
        try:
            while todo or active:
                if self.stop.asked:
                    todo = []
                    for attempt in active:
                        attempt.stop()
                if self.stop.at_once:
                    return
                while todo and len(active) < self.jobs:
                    active.append(Attempt(todo.pop(0), self.folder))
                active = [attempt for attempt in active if not self._finished(attempt)]
                self.screen.show([(attempt.cell, attempt.step()) for attempt in active])
                if active:
                    time.sleep(POLL_SECONDS)
        finally:
            for attempt in active:
                attempt.kill()

    def _finished(self, attempt: Attempt) -> bool:
        cell = attempt.cell
        try:
            if not attempt.done():
                return attempt.stopping and attempt.over
            record = record_of(attempt.run, cell.flags, epoch_steps=self.epoch_steps(cell), study=self.folder.digest())
        except (CellError, ValueError) as error:
            self.errors[cell.key] = " ".join(str(error).split())
            self.screen.failed(cell, self.errors[cell.key])
            return True
        self.comparable.admit(record)
        self.folder.append(record)
        self.records[cell.key] = record
        shutil.rmtree(attempt.run.path, ignore_errors=True)
        self.screen.finished(cell, record)
        return True
