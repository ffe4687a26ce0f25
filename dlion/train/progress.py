"""What the terminal shows: a live table on a terminal, plain lines elsewhere, nothing on ranks other than 0."""

import sys
import warnings
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from dlion.train.config import Settled
from dlion.train.data import DataInfo
from dlion.train.ranks import Ranks
from dlion.train.runs import Record, RunFolder

ROWS = 12
COLUMNS: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("loss", lambda r: _number(r.get("loss"), ".4f")),
    ("val loss", lambda r: _number(r.get("val_loss"), ".4f")),
    ("val acc", lambda r: _number(r.get("val_accuracy"), ".2%")),
    ("samples/s", lambda r: _number(r["samples_per_s"] or None, ",.0f")),
    ("bits/param", lambda r: _number(r["bits_per_param_sent"] or None, ".2f")),
    ("MB sent", lambda r: _number(r["bytes_sent"] / 1e6, ",.2f")),
    ("vs fp32", lambda r: _number(r["ratio"], ".1f", "x less") if r["bytes_sent"] else ""),
)


class Display(Protocol):
    """What the loop tells the user."""

    def start(self, folder: RunFolder, data: DataInfo, step: int, ranks: Ranks) -> None:
        """Training begins after `step` steps."""

    def show(self, record: Record) -> None:
        """A step was recorded."""

    def stopped(self, folder: RunFolder, step: int) -> None:
        """A signal ended training after `step`; a checkpoint was written."""

    def finished(self, folder: RunFolder, summary: Record) -> None:
        """Training is complete and everything is written."""


def display(config: Settled, rank: int, stream: TextIO | None = None) -> Display:
    """The display for this rank and for where its output goes (`stream`, standard output by default)."""
    if rank != 0:
        return Silent()
    stream = stream or sys.stdout
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return Terminal(config, console)
    return Plain(config, stream)


class Silent:
    """Only rank 0 speaks."""

    def start(self, folder: RunFolder, data: DataInfo, step: int, ranks: Ranks) -> None:
        warnings.showwarning = lambda *_, **__: None

    def show(self, record: Record) -> None: ...

    def stopped(self, folder: RunFolder, step: int) -> None: ...

    def finished(self, folder: RunFolder, summary: Record) -> None: ...


class Plain:
    """One line per record, without control characters."""

    def __init__(self, config: Settled, stream: TextIO) -> None:
        self._config = config
        self._stream = stream

    def start(self, folder: RunFolder, data: DataInfo, step: int, ranks: Ranks) -> None:
        warnings.showwarning = _warn_through(self._say)
        for line in _opening(self._config, folder, data, step, ranks):
            self._say(line)

    def show(self, record: Record) -> None:
        cells = ((name, text(record)) for name, text in COLUMNS)
        parts = [f"{name} {cell}" for name, cell in cells if cell]
        self._say(f"step {record['step']}/{self._config.steps}  {'  '.join(parts)}")

    def stopped(self, folder: RunFolder, step: int) -> None:
        self._say(_stop_line(folder, step))

    def finished(self, folder: RunFolder, summary: Record) -> None:
        for line in _closing(folder, summary):
            self._say(line)

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class Terminal:
    """A table that stays in place: the latest evaluations and the current step."""

    def __init__(self, config: Settled, console: Console) -> None:
        self._config = config
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._evaluated: list[Record] = []

    def start(self, folder: RunFolder, data: DataInfo, step: int, ranks: Ranks) -> None:
        warnings.showwarning = _warn_through(self._say)
        for line in _opening(self._config, folder, data, step, ranks):
            self._say(line)
        self._live.start()

    def show(self, record: Record) -> None:
        rows = [*self._evaluated[-ROWS:], record]
        if "val_loss" in record:
            self._evaluated.append(record)
        table = Table("step", *(name for name, _ in COLUMNS), box=None, pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        for row in rows:
            table.add_row(f"{row['step']}/{self._config.steps}", *(text(row) for _, text in COLUMNS))
        self._live.update(table, refresh=True)

    def stopped(self, folder: RunFolder, step: int) -> None:
        self._live.stop()
        self._say(_stop_line(folder, step))

    def finished(self, folder: RunFolder, summary: Record) -> None:
        self._live.stop()
        for line in _closing(folder, summary):
            self._say(line)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


def _opening(config: Settled, folder: RunFolder, data: DataInfo, step: int, ranks: Ranks) -> list[str]:
    threads = f"{ranks.threads} thread{'s' if ranks.threads > 1 else ''} each"
    workers = f"{config.workers} worker{'s' if config.workers > 1 else ''} on {ranks.device.type}, {threads}"
    first = f"{config.task} with {config.model}, {config.method}, {workers}: {folder.path}"
    resumed = [f"resumed after step {step}"] if step else []
    return [first, data.note, *resumed]


def _closing(folder: RunFolder, summary: Record) -> list[str]:
    accuracy = summary.get("val_accuracy")
    quality = f"validation loss {_number(summary['val_loss'], '.4f')}"
    if accuracy is not None:
        quality += f", accuracy {accuracy:.2%}"
    return [
        f"done: {quality} after {summary['steps']} steps, {summary['seconds']:.1f} s of training",
        f"each worker sent {summary['bits_per_param_sent']:.2f} bits per parameter and step, "
        f"{summary['bytes_sent'] / 1e6:,.2f} MB in all, {summary['ratio']:.1f} times less than fp32",
        f"kernels: {summary['kernels']}",
        f"report: {folder.report_file}",
        f"run folder: {folder.path}",
    ]


def _stop_line(folder: RunFolder, step: int) -> str:
    return f"stopped after step {step}; go on with: dlion train --resume {folder.path}"


def _warn_through(say: Callable[[str], None]) -> Callable[..., None]:
    def showwarning(message: Warning | str, *_: Any, **__: Any) -> None:
        say(f"warning: {' '.join(str(message).split())}")

    return showwarning


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
