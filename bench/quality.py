"""Measure what one bit costs in quality: methods at several learning rates and seeds; the README's table.

    python bench/quality.py --task text
    python bench/quality.py --task text --table --readme README.md

Every cell is one `dlion train`. What has finished is kept under --out and not run again, so the command may
be stopped and repeated. Flags after `--` go to `dlion train`.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

from quality_cells import (
    FIELDS,
    Cell,
    QualityError,
    Record,
    Settings,
    read_cells,
    read_settings,
    run_cells,
)
from quality_table import fill_readme, markdown

# Configuration that differs between the cells of one folder by design.
# The default of betas follows from the method; betas that were asked for are in the settings' flags.
VARIES = ("method", "lr", "seed", "betas")


def train_command(settings: Settings, cell: Cell, runs: Path) -> list[str]:
    """The `dlion train` of one cell; its run folder is `runs/CELL`."""
    return [
        *(sys.executable, "-m", "dlion", "train", "--task", settings.task, "--method", cell.method),
        *("--workers", str(settings.workers), "--steps", str(settings.steps)),
        *("--lr", repr(cell.lr), "--seed", str(cell.seed), "--name", cell.name, "--out", str(runs)),
        *settings.flags,
    ]


def train(settings: Settings, cell: Cell, folder: Path, seconds: float | None) -> Record:
    """Run one cell, its output in logs/CELL.log, and read its summary; the run folder is removed afterwards.

    Raises: TimeoutError after `seconds`; QualityError when the command fails.
    """
    runs = folder / "runs"
    log = folder / "logs" / f"{cell.name}.log"
    log.parent.mkdir(exist_ok=True)
    # Left by a run that was stopped; its numbers were never used.
    shutil.rmtree(runs / cell.name, ignore_errors=True)
    with log.open("wb") as output:
        # A session of its own, so that the workers can be ended with the command.
        process = subprocess.Popen(
            train_command(settings, cell, runs),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(cell.name) from None
            raise
    if status != 0:
        tail = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise QualityError(f"{cell.name}: dlion train ended with status {status}, see {log}: {' '.join(tail)}")
    result = read_run(runs / cell.name)
    shutil.rmtree(runs / cell.name)
    return result


def read_run(run: Path) -> Record:
    """The fields of a cell from a finished run folder."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    summary["data_sha256"] = summary["data"]["sha256"]
    summary["config"] = {name: value for name, value in config.items() if name not in VARIES}
    summary.setdefault("val_accuracy", None)  # text has none
    return {name: summary[name] for name in FIELDS}


def parse(arguments: list[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=["text", "fashion-mnist", "cifar10"])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run (default 300)")
    parser.add_argument("--workers", type=int, default=4, help="workers of each run (default 4)")
    parser.add_argument("--methods", nargs="+", default=["dlion-mavo", "g-lion"], metavar="METHOD")
    parser.add_argument("--lrs", nargs="+", type=float, default=[3e-4, 1e-3, 2e-3], metavar="LR")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--out", type=Path, help="folder of the results (default bench/results/quality-TASK)")
    parser.add_argument("--limit-minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--table", action="store_true", help="run nothing: print the table of what is there")
    parser.add_argument("--readme", type=Path, help="also write the table between the marks of this file")
    return parser.parse_args(arguments[:split]), tuple(arguments[split + 1 :])


def main(arguments: list[str]) -> int:
    options, flags = parse(arguments)
    folder = options.out or Path(__file__).parent / "results" / f"quality-{options.task}"
    try:
        if not options.table:
            settings = Settings(options.task, options.steps, options.workers, flags)
            # Seeds last: the first pass over the grid already compares the methods.
            cells = [
                Cell(method, lr, seed) for seed, lr, method in product(options.seeds, options.lrs, options.methods)
            ]
            run_cells(settings, cells, folder, train, limit_seconds=options.limit_minutes * 60)
        held = read_settings(folder)
        section = markdown(held, read_cells(folder))
        print(section)
        if options.readme:
            fill_readme(options.readme, held.task, section)
    except QualityError as error:
        print(f"quality.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
