"""What the terminal shows while cells run: a bar with the time left, or a plain line per cell where there is none."""

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dlion.train.compare.cells import Cell
from dlion.train.compare.folder import Record


class Screen:
    """Counts cells, and their work, of which the time left is told.

    Args:
        planned: work of the cells that may come, by key; those whose settings are not chosen yet by any other key.
        done: keys of those that are recorded already.
    """

    def __init__(self, planned: dict[str, float], done: Iterable[str], stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        console = Console(file=self._stream, highlight=False)
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
            self._bar = Progress(*columns, console=console, auto_refresh=False)
        self._planned = planned
        self._left = {key: work for key, work in planned.items() if key not in set(done)}
        self._task = None if self._bar is None else self._bar.add_task("", total=sum(planned.values()), left="")
        self._began = time.monotonic()
        self._work = 0.0
        self._running = 0.0

    def __enter__(self) -> "Screen":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()

    def say(self, text: str) -> None:
        """Tell something that happens once."""
        with suppress(OSError):
            if self._bar is not None:
                self._bar.console.print(text, markup=False, soft_wrap=True)
            else:
                print(text, file=self._stream, flush=True)

    def plan(self, cells: Iterable[Cell]) -> None:
        """The cells of the second stage are known now: they take the place of those that were only counted."""
        for name in [key for key in self._planned if key.startswith("?")]:
            del self._planned[name]
            self._left.pop(name, None)
        for cell in cells:
            if cell.key not in self._planned:
                self._planned[cell.key] = self._left[cell.key] = cell.work

    def recorded(self, keys: Iterable[str]) -> None:
        """These need not run."""
        for key in keys:
            self._left.pop(key, None)

    def finished(self, cell: Cell, record: Record) -> None:
        """A cell is recorded."""
        self._count(cell)
        accuracy = record.get("best_val_accuracy")
        best = f"best loss {record['best_val_loss']:.4f}" if accuracy is None else f"best accuracy {accuracy:.2%}"
        result = "diverged" if record["diverged"] else best
        self.say(f"{self._counted} {cell.words}: {result}, {record['seconds']:.1f} s; {self.time_left}")

    def failed(self, cell: Cell, error: str) -> None:
        """A cell crashed."""
        self._count(cell)
        self.say(f"{self._counted} error: {error}")

    def show(self, running: Sequence[tuple[Cell, int]]) -> None:
        """How far the cells under way are: each with its last step."""
        self._running = sum(cell.work * min(1.0, step / cell.steps) for cell, step in running)
        if self._bar is None or self._task is None:
            return
        done = sum(self._planned.values()) - sum(self._left.values()) + self._running
        steps = " ".join(str(step) for _, step in running)
        under_way = f", {len(running)} running, step {steps}" if running else ""
        with suppress(OSError):
            self._bar.update(
                self._task,
                description=f"{self._counted}{under_way}",
                total=max(sum(self._planned.values()), 1e-9),
                completed=done,
                left=self.time_left,
            )
            self._bar.refresh()

    @property
    def time_left(self) -> str:
        """'about 14 min left'."""
        done = self._work + self._running
        if not done:
            return "time left unknown yet"
        seconds = (time.monotonic() - self._began) / done * (sum(self._left.values()) - self._running)
        return f"about {_duration(seconds)} left"

    @property
    def _counted(self) -> str:
        return f"[{len(self._planned) - len(self._left)}/{len(self._planned)}]"

    def _count(self, cell: Cell) -> None:
        self._work += self._left.pop(cell.key, 0.0)
        self._running = 0.0  # until it is shown again


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
