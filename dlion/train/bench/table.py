"""The figures of a measurement as a table, and what the terminal shows of it."""

import sys
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from dlion.train.bench.ratios import BASE
from dlion.train.bench.sentence import bare_exchange, duration, shown, volume

Result = dict[str, Any]

COLUMNS = ("step", "to dlion", "over rounds", "exposed", "sent", "bits/param", "interface")
WIDTH = 96  # where the output has no width of its own
COLUMNS_MEAN = (
    "Over rounds: where the median ratio lies, 95 % (under 6 rounds: the lowest and the highest).",
    "Exposed: beyond the step without communication. Sent: counted by dlion, else by formula.",
    "Interface: the kernel's count, with TCP/IP headers and the measurement's own barriers.",
)
PHASES_MEAN = "Phases are means over the workers; a step counts the slowest, so they add up to less."


def cells(result: Result, name: str) -> list[str]:
    """One contender's figures, under COLUMNS; COLUMNS_MEAN says what they are."""
    contenders = result["contenders"]
    found = contenders[name]
    sent = found["sent_by_formula"] if found["sent"] is None else found["sent"]
    against, alone = result["ratios"].get(name), contenders.get("no communication")
    return [
        duration(found["seconds"]),
        _times(against["median"]) if against else "",
        f"{_times(against['low'])} to {_times(against['high'])}" if against and name != BASE else "",
        duration(max(0.0, found["seconds"] - alone["seconds"])) if alone else "",
        volume(sent),
        f"{8 * sent / result['parameters']:.2f}" if sent else "",
        "" if found["interface_sent"] is None else volume(found["interface_sent"]),
    ]


def _times(ratio: float) -> str:
    """'1.22', '24.9', '125'."""
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}"


def phases_of(result: Result) -> dict[str, dict[str, float]]:
    """Seconds by phase of each contender that votes."""
    spent = {"dlion": result["phases"], "dlion overlap": result["overlap_phases"]}
    return {name: one for name, one in spent.items() if one is not None}


def show(result: Result, stream: TextIO | None = None) -> None:
    """The table, the phases, the network and the sentence: in colours on a terminal, plain elsewhere."""
    console = Console(file=stream or sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    with suppress(OSError, SystemExit):  # rich wants to end the process where nobody reads on, as after `| head`
        console.print()
        console.print(_contenders(result))
        console.print(*COLUMNS_MEAN, sep="\n", style="dim")
        console.print()
        if phases_of(result):
            console.print(_phases(result))
            console.print(PHASES_MEAN, style="dim")
            console.print()
        console.print(bare_exchange(result), style="dim")
        console.print()
        console.print(result["sentence"], style="bold")


def _contenders(result: Result) -> Table:
    headers = [name.replace(" ", "\n").replace("/", "/\n") for name in COLUMNS]  # 80 columns are enough
    table = Table("", *headers, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in result["contenders"]:
        table.add_row(shown(name), *cells(result, name), style="bold" if name.startswith("dlion") else None)
    return _aligned(table)


def _phases(result: Result) -> Table:
    spent = phases_of(result)
    table = Table("", *next(iter(spent.values())), box=None, pad_edge=False)
    for name, one in spent.items():
        table.add_row(shown(name), *(duration(seconds) for seconds in one.values()))
    return _aligned(table)


def _aligned(table: Table) -> Table:
    for column in table.columns[1:]:
        column.justify = "right"
    for column in table.columns:
        column.no_wrap = True
    return table
