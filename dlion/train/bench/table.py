"""The figures of a measurement as a table, and what the terminal shows of it."""

import sys
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from dlion.train.bench.sentence import duration, rate, volume

Result = dict[str, Any]

COLUMNS = ("step", "to dlion", "exposed", "sent", "bits/param", "interface")
WIDTH = 96  # where the output has no width of its own


def cells(result: Result, name: str) -> list[str]:
    """One contender's figures, under COLUMNS.

    "to dlion" is the ratio of its step to dlion's, "exposed" its step less the one without communication; "sent" is
    counted where dlion counts, and by formula elsewhere.
    """
    contenders = result["contenders"]
    found = contenders[name]
    sent = found["sent_by_formula"] if found["sent"] is None else found["sent"]
    beside = {other: contenders[other]["seconds"] for other in ("dlion", "no communication") if other in contenders}
    exposed = found["seconds"] - beside.get("no communication", found["seconds"])
    return [
        duration(found["seconds"]),
        f"{found['seconds'] / beside['dlion']:.2f}" if "dlion" in beside else "",
        duration(exposed) if exposed > 0 else "",
        volume(sent),
        f"{8 * sent / result['parameters']:.2f}" if sent else "",
        "" if found["interface_sent"] is None else volume(found["interface_sent"]),
    ]


def phases_of(result: Result) -> dict[str, dict[str, float]]:
    """Seconds by phase of each contender that votes."""
    spent = {"dlion": result["phases"], "dlion overlap": result["overlap_phases"]}
    return {name: one for name, one in spent.items() if one is not None}


def show(result: Result, stream: TextIO | None = None) -> None:
    """The table, the phases, the network and the sentence: in colours on a terminal, plain elsewhere."""
    console = Console(file=stream or sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    with suppress(OSError):
        console.print()
        console.print(_contenders(result))
        console.print()
        if phases_of(result):
            console.print(_phases(result))
            console.print()
        bare = result["bare_exchange"]
        moved = f"{volume(bare['payload'])} in {duration(bare['seconds'])}, {rate(bare['mbit_per_s'])}"
        console.print(f"bare exchange, the rows of one vote and nothing else: {moved}")
        console.print(result["sentence"], style="bold")


def _contenders(result: Result) -> Table:
    table = Table("", *COLUMNS, box=None, pad_edge=False)
    for name in result["contenders"]:
        table.add_row(name, *cells(result, name), style="bold" if name.startswith("dlion") else None)
    return _aligned(table)


def _phases(result: Result) -> Table:
    spent = phases_of(result)
    table = Table("", *next(iter(spent.values())), box=None, pad_edge=False)
    for name, one in spent.items():
        table.add_row(name, *(duration(seconds) for seconds in one.values()))
    return _aligned(table)


def _aligned(table: Table) -> Table:
    for column in table.columns[1:]:
        column.justify = "right"
    for column in table.columns:
        column.no_wrap = True
    return table
