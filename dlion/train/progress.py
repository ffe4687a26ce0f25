"""What the terminal shows: a live table on a terminal, plain lines elsewhere, nothing on ranks other than 0."""

import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from dlion.train.runs import Record, RunFolder

ROWS = 12
LESS = 1.05  # a ratio to fp32 below this is said in other words
COLUMNS: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("loss", lambda r: _number(r.get("loss"), ".4f")),
    ("val loss", lambda r: _number(r.get("val_loss"), ".4f")),
    ("val acc", lambda r: _number(r.get("val_accuracy"), ".2%")),
    ("samples/s", lambda r: _number(r["samples_per_s"] or None, ",.0f")),
    ("bits/param", lambda r: _number(r["bits_per_param_sent"] or None, ".2f")),
    ("MB sent", lambda r: _number(r["bytes_sent"] / 1e6, ",.2f") if r["step"] else ""),
    ("vs fp32", lambda r: f"{r['ratio']:.1f}x less" if r["bytes_sent"] and r["ratio"] >= LESS else ""),
)


class Display(Protocol):
    """What the loop tells the user. A closed pipe or terminal is no reason to stop training: it then says nothing."""

    def say(self, *lines: str) -> None:
        """Tell something that happens once."""

    def show(self, record: Record) -> None:
        """A step was recorded."""

    def close(self) -> None:
        """No more records will come."""


def display(steps: int, rank: int, stream: TextIO | None = None) -> Display:
    """The display of a run of `steps` for this rank and for where its output goes (standard output by default).

    Python's warnings go the same way, in one line each.
    """
    chosen: Display = Silent()
    if rank == 0:
        console = Console(file=stream or sys.stdout, highlight=False)
        on_terminal = console.is_terminal and not console.is_dumb_terminal
        chosen = Terminal(steps, console) if on_terminal else Plain(steps, stream or sys.stdout)
    warnings.showwarning = _through(chosen)
    return chosen


class Silent:
    """Only rank 0 speaks."""

    def say(self, *lines: str) -> None: ...

    def show(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Plain:
    """One line per record, without control characters."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self._steps = steps
        self._stream = stream

    def say(self, *lines: str) -> None:
        with suppress(OSError):
            for line in lines:
                print(line, file=self._stream, flush=True)

    def show(self, record: Record) -> None:
        cells = ((name, text(record)) for name, text in COLUMNS)
        parts = [f"{name} {cell}" for name, cell in cells if cell]
        self.say(f"step {record['step']}/{self._steps}  {'  '.join(parts)}")

    def close(self) -> None: ...


class Terminal:
    """A table that stays in place: the latest evaluations and the current step."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps = steps
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._evaluated: list[Record] = []

    def say(self, *lines: str) -> None:
        with suppress(OSError):
            for line in lines:
                self._console.print(line, markup=False, soft_wrap=True)

    def show(self, record: Record) -> None:
        table = Table("step", *(name for name, _ in COLUMNS), box=None, pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        for row in [*self._evaluated[-ROWS:], record]:
            table.add_row(f"{row['step']}/{self._steps}", *(text(row) for _, text in COLUMNS))
        if "val_loss" in record:
            self._evaluated.append(record)
        with suppress(OSError):
            self._live.start()
            self._live.update(table, refresh=True)

    def close(self) -> None:
        with suppress(OSError):
            self._live.stop()


def results(folder: RunFolder, summary: Record) -> list[str]:
    """The last words about a finished run."""
    ratio = summary["ratio"]
    less = f"{ratio:.1f} times less than" if ratio >= LESS else "as much as"
    return [
        f"done: {_quality(summary, '')} after {summary['steps']} steps, {summary['seconds']:.1f} s of training",
        f"best: {_quality(summary, 'best_')} at step {summary['best_step']}: {folder.best_model.name}",
        f"each worker sent {summary['bits_per_param_sent']:.2f} bits per parameter and step, "
        f"{summary['bytes_sent'] / 1e6:,.2f} MB in all, {less} an fp32 ring all-reduce",
        f"{_count(summary['checkpoints'], 'checkpoint')} held up training for {summary['checkpoint_seconds']:.2f} s",
        f"report: {folder.report_file}",
        f"run folder: {folder.path}",
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _quality(summary: Record, which: str) -> str:
    accuracy = summary.get(f"{which}val_accuracy")
    loss = f"validation loss {_number(summary[f'{which}val_loss'], '.4f')}"
    return loss if accuracy is None else f"{loss}, accuracy {accuracy:.2%}"


def _through(display: Display) -> Callable[..., None]:
    def showwarning(message: Warning | str, *_: Any, **__: Any) -> None:
        display.say(f"warning: {' '.join(str(message).split())}")

    return showwarning


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
