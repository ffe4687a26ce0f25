"""A plan as tables, and what the terminal shows of it."""

import sys
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from dlion.train.bench.sentence import duration, rate, volume
from dlion.train.plan.methods import ALONE, BASE
from dlion.train.plan.result import SIMILAR

Result = dict[str, Any]

COLUMNS = (
    "step",
    f"{BASE} / this",
    "local",
    "exchange",
    "exposed",
    "sent",
    "bits/param",
    "beyond formula",
    "break-even",
)
COLUMNS_MEAN = (
    "Step: compute + local + exposed. Local: the optimizer and what makes and reads messages. Exchange: the calls if",
    "nothing hid them; exposed: what the backward pass does not hide. Sent: by the worker that sends most, and with",
    f"headers and padding, which go beyond the formula. Break-even: below this bandwidth quicker than {BASE}.",
    "≥: a lower bound, since the compression itself was not timed.",
)
WIDTH = 118  # where the output has no width of its own


def cells(found: Result) -> list[str]:
    """One method's figures, under COLUMNS."""
    return [
        least(found) + duration(found["seconds"]),
        f"{found['to_base']:.2f}" if "to_base" in found else "",
        duration(found["local"]),
        duration(found["exchange"]),
        duration(found["exposed"]),
        volume(found["sent"]),
        f"{found['bits_per_parameter']:.3g}",
        f"{found['overhead']:+.2%}" if found["formula"] else "",
        even(found.get("break_even")),
    ]


def least(found: Result) -> str:
    """The mark of a lower bound."""
    return "≥ " if found["untimed"] else ""


def even(found: Result | None) -> str:
    """'2.1 Gbit/s', 'always', 'never'."""
    if found is None:
        return ""
    if found["pays"] == "below":
        return rate(found["mbit_per_s"])
    return "always" if found["pays"] == "everywhere" else "never"


def by_number(result: Result, figure: str) -> dict[str, list[str]]:
    """A figure of every method by number of workers: "seconds" or "bits_per_parameter"."""
    found, methods = result["numbers"][figure], result["methods"]
    if figure == "seconds":
        return {name: [least(methods[name]) + duration(value) for value in row] for name, row in found.items()}
    return {name: [f"{value:.3g}" for value in row] for name, row in found.items() if name != ALONE}


def heads(result: Result) -> list[str]:
    """'N = 10', ..."""
    return [f"N = {n:,}" for n in result["numbers"]["workers"]]


def setting(result: Result) -> str:
    """What was asked, in one sentence."""
    asked, model = result["settings"], result["model"]
    nodes = result["nodes"]
    where = f"{nodes} nodes of {min(asked['per_node'], asked['workers'])}" if nodes > 1 else "one node"
    links = f"{asked['bandwidth']:g} Gbit/s and {asked['latency']:g} µs between nodes, " if nodes > 1 else ""
    size = f"{model['tensors']:,} tensor{'s' if model['tensors'] > 1 else ''}"
    if not model["name"].endswith("parameters"):
        size = f"{model['parameters']:,} parameters, {size}"
    workers = f"{asked['workers']:,} worker{'s' if asked['workers'] > 1 else ''}"
    return (
        f"{model['name'][0].upper()}{model['name'][1:]} ({size}); "
        f"{workers} on {where}; {links}{asked['inside_bandwidth']:g} Gbit/s and "
        f"{asked['inside_latency']:g} µs inside; {duration(asked['compute'])} of forward and backward."
    )


def overhead(result: Result) -> str:
    """Where headers and padding matter."""
    found, numbers = result["methods"]["dlion-mavo"], result["numbers"]
    beyond = [
        f"{value:.0%} among {n:,}"
        for n, value in zip(numbers["workers"], numbers["overhead"]["dlion-mavo"], strict=True)
        if value > SIMILAR
    ]
    here = "within" if found["overhead"] <= SIMILAR else "not within"
    grown = f"; with more workers they grow, to {', '.join(beyond)}" if beyond else ""
    return (
        f"Headers and padding of dlion-mavo: {found['overhead']:.2%} beyond the formula's "
        f"{volume(found['formula'])}, {here} {SIMILAR:.0%}{grown}."
    )


def show(result: Result, stream: TextIO | None = None) -> None:
    """All tables and what the plan leaves out: in colours on a terminal, plain elsewhere."""
    console = Console(file=stream or sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    heading = {name: cells(found) for name, found in result["methods"].items()}
    topologies = {name: cells(found) for name, found in result["topologies"].items()}
    with suppress(OSError, SystemExit):  # rich wants to end the process where nobody reads on, as after `| head`
        console.print(setting(result), style="bold")
        for columns, rows in (
            (COLUMNS, heading),
            (COLUMNS[:-1], {name: row[:-1] for name, row in topologies.items()}),
            (heads(result), by_number(result, "seconds")),
        ):
            console.print()
            console.print(_table(tuple(columns), rows))
        console.print()
        console.print(*COLUMNS_MEAN, sep="\n", style="dim")
        console.print()
        console.print(overhead(result), style="bold")
        console.print("What this leaves out:", *(f"- {text}" for text in result["left_out"]), sep="\n", style="dim")


def _table(columns: tuple[str, ...], rows: dict[str, list[str]]) -> Table:
    table = Table("", *(name.replace(" / ", "\n/ ").replace("beyond ", "beyond\n") for name in columns), box=None)
    table.pad_edge = False
    for name, row in rows.items():
        table.add_row(name, *row, style="bold" if name.startswith("dlion") else None)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column is table.columns[0] else "right"
    return table
