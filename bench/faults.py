"""Let workers of `dlion train` fail by plan, look at what becomes of the others, and make the tables of the documents.

    python bench/faults.py --only static                     every kind of fault and phase, 25 runs (8 minutes)
    python bench/faults.py --only soak --minutes 10          random faults, until time is up
    python bench/faults.py --only elastic                    60 runs with one kill each, of workers that go on
    python bench/faults.py --only elastic-return             20 runs with a kill and the worker's return
    python bench/faults.py --only elastic-whole              what these are compared with: no fault
    python bench/faults.py --only short                      two runs, what continuous integration does
    python bench/faults.py --table --docs docs/reliability.md    run nothing: write the tables from what is there

Workers are processes; faults hit them at a planned step and phase (fault_plan.py), and of every one it is proved that
it did. Finished runs are kept in docs/results/faults and not repeated.

Exit status: 0, everything held; 1, something did not; 2, a mistake in the arguments; 3, a fault that was planned did
not happen, so that nothing is proved.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fault_checks
from documents import fill, write_whole
from fault_plan import CELLS, Cell, cells, moved
from fault_runs import NotFiredError, load, missing_for_disk
from fault_table import parts
from links import missing, stopping_on_signals

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "faults"
FAILED, USER_ERROR, NOT_FIRED = 1, 2, 3
ENDLESS = ("soak",)
KEYS = tuple(Cell("", 0, ()).described())


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CELLS), default="short", help="which experiment (default short)")
    parser.add_argument("--seed", type=int, default=0, help="of the plan")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after this time")
    parser.add_argument("--runs", type=int, default=None, help="only the first so many")
    parser.add_argument("--again", action="store_true", help="forget the runs of this experiment that have finished")
    parser.add_argument("--at-step", type=int, default=None, help="let every fault hit at this step")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--keep", type=Path, default=None, help="folder for what failed; without it nothing is kept")
    parser.add_argument("--docs", type=Path, help="write the tables between the marks of this file")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    if options.only in ENDLESS and math.isinf(options.minutes) and options.runs is None and not options.table:
        parser.error(f"{options.only} never ends by itself: give --minutes or --runs.")
    return options


def lines_of(file: Path) -> list[Record]:
    """The finished runs in a file of results."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def chosen(options: argparse.Namespace, finished: Sequence[Record]) -> Iterator[Cell]:
    """The cells to run, in order."""
    known = [(record["seed"], {key: record[key] for key in KEYS}) for record in finished]
    for cell in cells(options.only, options.seed):
        if options.runs is not None and cell.number >= options.runs:
            return
        planned = cell if options.at_step is None else moved(cell, options.at_step)
        if (options.seed, planned.described()) not in known:
            yield planned


def left_out(cell: Cell, lacking: dict[str, str | None]) -> str | None:
    """Why this cell cannot be run on this machine, or None."""
    return next((lacking[fault.kind] for fault in cell.faults if lacking.get(fault.kind)), None)


def run_cells(options: argparse.Namespace, file: Path) -> int:
    """Run what has not finished; the exit status."""
    began, status = time.monotonic(), 0
    load()
    lacking = {"slow": missing(), "full": missing_for_disk()}
    with tempfile.TemporaryDirectory(prefix="dlion-faults-") as scratch:
        run_cell = runner(options.only, Path(scratch))
        for cell in chosen(options, lines_of(file)):
            if time.monotonic() - began >= options.minutes * 60:
                print("Time is up: the same command goes on.")
                break
            if why := left_out(cell, lacking):
                print(f"{cell.name}: left out: {why}")
                continue
            folder = Path(scratch) / cell.name
            try:
                record = run_cell(cell, folder) | {"seed": options.seed}
            except NotFiredError as error:
                print(f"faults.py: a fault did not happen: {error}", file=sys.stderr)
                _keep(folder, options.keep)
                return NOT_FIRED
            print(told(record), flush=True)
            with file.open("a", encoding="utf-8") as kept:
                kept.write(json.dumps(record) + "\n")
                kept.flush()
                os.fsync(kept.fileno())
            if not record["ok"]:
                status = FAILED
                _keep(folder, options.keep)
            shutil.rmtree(folder)
    return status


def runner(experiment: str, scratch: Path) -> Callable[[Cell, Path], Record]:
    """What runs a cell of this experiment in a folder of its own."""
    if experiment.startswith("elastic"):
        try:
            import fault_elastic
        except ModuleNotFoundError as error:
            raise ValueError(f"{experiment} needs elastic workers, and {error.name} is missing.") from None
        return fault_elastic.run_cell
    return partial(fault_checks.run_cell, courses=fault_checks.Courses(scratch))


def _keep(folder: Path, where: Path | None) -> None:
    if where is not None:
        shutil.copytree(folder, where / folder.name, dirs_exist_ok=True)


def told(record: Record) -> str:
    """One line for the terminal."""
    faults = ", ".join(f"{f['kind']} of {f['rank']} at step {f['step']} ({f['phase']})" for f in record["faults"])
    broken = [name for name, held in record["checks"].items() if not held]
    outcome = "held" if not broken else f"BROKEN: {', '.join(broken)}: {' / '.join(record['said'])}"
    return f"{record['cell']}: {faults}: {outcome} [{'; '.join(record['proof'])}] {record['seconds']} s"


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    file, status = options.results / f"{options.only}.jsonl", 0
    try:
        options.results.mkdir(parents=True, exist_ok=True)
        if not options.table:
            if options.again:
                write_whole(file, "")
            with stopping_on_signals():
                status = run_cells(options, file)
        found = {experiment: lines_of(options.results / f"{experiment}.jsonl") for experiment in CELLS}
        for part, section in parts(found).items():
            if options.docs:
                fill(options.docs, "faults", part, section)
            elif part == options.only:
                print(f"\n{section}")
    except (ValueError, OSError) as error:
        print(f"faults.py: {error}", file=sys.stderr)
        return USER_ERROR
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
