"""Tables and curves of what bench/robustness.py found.

    python bench/robustness_page.py --docs docs/robustness.md

Writes robustness-N.svg beside the document for each number of workers N, and puts the tables between the marks
`<!-- robustness:begin NAME -->` and `<!-- robustness:end NAME -->`.
"""

import argparse
import io
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from documents import fill, write_whole
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from robustness import HONEST, LIARS, RATES, SEEDS, Cell, found

from dlion.train.compare.looks import look
from dlion.train.page import STYLE

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "robustness"
NAMES = {"dlion-mavo": "majority (dlion-mavo)", "dlion-avg": "average (dlion-avg)"}
INK, PAPER = "#222222", "#ffffff"
CEILING = 4.5  # nats: what lies above is drawn there
Records = dict[Cell, dict[str, Any]]


def halfway(record: dict[str, Any]) -> float:
    """The validation loss after half of the steps: what runs with liars must reach."""
    return float(record["val_loss"][record["step"].index(record["step"][-1] // 2)])


def seeds_of(records: Records, cell: Cell) -> list[Cell]:
    """The same run with every seed for which it is there, and its honest one too."""
    cells = [Cell(cell.method, cell.workers, cell.attack, cell.liars, seed) for seed in SEEDS]
    return [one for one in cells if one in records and honest(one) in records]


def honest(cell: Cell, method: str | None = None) -> Cell:
    """The run that this one is held to: of its own method, or of another one."""
    return Cell(method or cell.method, cell.workers, HONEST, 0, cell.seed)


def reached(records: Records, cell: Cell, method: str | None = None) -> int | None:
    """The step at which a run reaches the target; None where it does not."""
    record, target = records[cell], halfway(records[honest(cell, method)])
    return next((step for step, loss in zip(record["step"], record["val_loss"], strict=True) if loss <= target), None)


def survives(records: Records, cell: Cell, method: str) -> str:
    """Whether the target of the honest runs of `method` is reached: yes, no, or in how many of the seeds."""
    steps = [reached(records, one, method) for one in seeds_of(records, cell)]
    if not steps:
        return "not run"
    good = sum(step is not None for step in steps)
    return "yes" if good == len(steps) else "no" if not good else f"{good} of {len(steps)} seeds"


def limits(records: Records) -> str:
    """The largest number of liars with which every run reaches the target, as every smaller number does.

    The last column holds the average to the target of the majority.
    """
    columns = [*NAMES.values(), "average, held to the majority's target"]
    lines = ["| workers | attack | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for workers, attacks in LIARS.items():
        for attack, counts in attacks.items():
            cells = [_limit(records, method, method, workers, attack, counts) for method in NAMES]
            cells.append(_limit(records, "dlion-avg", "dlion-mavo", workers, attack, counts))
            lines.append(f"| {workers} | {attack} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _limit(records: Records, method: str, model: str, workers: int, attack: str, counts: Sequence[int]) -> str:
    most, failed = 0, ", the most tried"
    for liars in counts:
        said = survives(records, Cell(method, workers, attack, liars, SEEDS[0]), model)
        if said == "not run":
            return f"{most}; not run from {liars} on"
        if said != "yes":
            failed = f", not {liars}" if said == "no" else f", {liars} in {said}"
            break
        most = liars
    return f"**{most}**{failed}"


def losses(records: Records, workers: int) -> str:
    """The last loss of every run, mean over seeds, and where it reached the target."""
    head = "| attack | liars | " + " | ".join(f"{name}: last loss | target reached at step" for name in NAMES.values())
    lines = [head + " |", "|---|---|" + "---|---|" * len(NAMES)]
    for attack, counts in {HONEST: (0,), **LIARS[workers]}.items():
        for liars in counts:
            cells = []
            for method in NAMES:
                cells += _row(records, Cell(method, workers, attack, liars, SEEDS[0]))
            lines.append(f"| {attack} | {liars} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _row(records: Records, cell: Cell) -> list[str]:
    cells = seeds_of(records, cell)
    if not cells:
        return ["not run", ""]
    last = [records[one]["val_loss"][-1] for one in cells]
    steps = [reached(records, one) for one in cells]
    if cell.attack == HONEST:
        targets = [halfway(records[one]) for one in cells]
        return [f"{statistics.fmean(last):.3f}", f"(target {' and '.join(f'{target:.3f}' for target in targets)})"]
    return [f"{statistics.fmean(last):.3f}", " and ".join("never" if step is None else str(step) for step in steps)]


def drawing(records: Records, workers: int) -> str:
    """Curves of every run of the first seed: a row for each attack, a column for each method."""
    style = {key: INK if value == "#010203" else value for key, value in STYLE.items()}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.0, 9.6), layout="constrained", facecolor=PAPER)
        axes = figure.subplots(len(LIARS[workers]), len(NAMES), sharex=True, sharey=True)
        for row, (attack, counts) in enumerate(LIARS[workers].items()):
            for column, method in enumerate(NAMES):
                _curves(axes[row, column], records, method, workers, attack, counts)
                axes[row, column].set_title(f"{attack}, {NAMES[method]}", fontsize=10)
        for row in range(len(LIARS[workers])):
            axes[row, 0].set_ylabel("validation loss, nats")
            axes[row, -1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        for column in range(len(NAMES)):
            axes[-1, column].set_xlabel("step")
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def _curves(axes: Axes, records: Records, method: str, workers: int, attack: str, counts: Sequence[int]) -> None:
    honest_run = records[Cell(method, workers, HONEST, 0, SEEDS[0])]
    axes.axhline(halfway(honest_run), color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    for number, liars in enumerate((0, *counts)):
        record = records.get(Cell(method, workers, attack if liars else HONEST, liars, SEEDS[0]))
        if record is not None:
            capped = [min(loss, CEILING) for loss in record["val_loss"]]
            name = f"{liars} liar{'s' if liars > 1 else ''}" if liars else "honest"
            axes.plot(record["step"], capped, label=name, **{**look(number), "markersize": 3.5, "linewidth": 1.2})
    axes.set_ylim(2.5, CEILING)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="the document; without it the tables are printed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    records = found(options.results)
    tables = {"limits": limits(records)} | {f"losses {workers}": losses(records, workers) for workers in LIARS}
    if options.docs is None:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in tables.items()))
        return 0
    try:
        for name, text in tables.items():
            fill(options.docs, "robustness", name, text)
    except ValueError as error:
        print(f"robustness_page.py: {error}", file=sys.stderr)
        return 2
    for workers in LIARS:
        if all(Cell(method, workers, HONEST, 0, SEEDS[0]) in records for method in RATES):
            write_whole(options.docs.with_name(f"robustness-{workers}.svg"), drawing(records, workers))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
