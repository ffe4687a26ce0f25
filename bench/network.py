"""Measure dlion on emulated links, keep the figures, and make the tables of docs/benchmarks.md from them.

    python bench/network.py                                  everything that has not finished yet (25 minutes)
    python bench/network.py --only 100mbit 10mbit --again    these, although they have finished
    python bench/network.py --table                          run nothing: make the tables from what is there

Needs root and iproute2. Exit status: 0, everything asked for is there; 1, something failed or was refused; 2, a
mistake in the arguments; 77, skipped: there can be no emulated links here.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from documents import fill
from links import LinkError, missing, stopping_on_signals
from network_experiments import EXPERIMENTS, ROOT, Experiment, Record, RefusedError, measure
from network_results import ResultsError, keep, read
from network_table import parts
from workers import WorkerError

FAILED, USER_ERROR, SKIPPED = 1, 2, 77
PUBLISHED = "network"  # the results that documents are made from


def run_experiments(
    experiments: Sequence[Experiment],
    folder: Path,
    measure: Callable[[Experiment, int], Record],
    *,
    limit_seconds: float = math.inf,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run the experiments, keep each when all its runs have finished; True if all did.

    One that fails or is refused leaves no figure, and the next one has its turn. None begins after `limit_seconds`.
    """
    began, complete = clock(), True
    for number, experiment in enumerate(experiments, start=1):
        if clock() - began >= limit_seconds:
            say(f"Time is up with {len(experiments) - number + 1} experiments to go: the same command goes on.")
            return False
        say(f"[{number}/{len(experiments)}] {experiment.name}: {experiment.title}")
        started = clock()
        try:
            runs = [measure(experiment, run) for run in range(1, experiment.runs + 1)]
        except (LinkError, WorkerError, RefusedError) as error:
            say(f"network.py: {experiment.name} gives no figure: {error}")
            complete = False
            continue
        keep(folder, experiment, runs)
        say(f"    done in {clock() - started:.0f} s")
    return complete


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = [experiment.name for experiment in EXPERIMENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="EXPERIMENT", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="also what has finished before")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no experiment after this time")
    parser.add_argument("--name", default=PUBLISHED, help=f"results go to bench/results/NAME (default {PUBLISHED})")
    parser.add_argument(
        "--docs", type=Path, help=f"write the tables between the marks of this file (those of --name {PUBLISHED} alone)"
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    folder = ROOT / "bench" / "results" / options.name
    status = 0
    try:
        finished = {} if options.again else read(folder, EXPERIMENTS)
        chosen = [e for e in EXPERIMENTS if e.name in options.only and e.name not in finished]
        if chosen and not options.table:
            if lacking := missing():
                print(f"skipped: {lacking} Not measured: {', '.join(e.name for e in chosen)}.", file=sys.stderr)
                status = SKIPPED
            else:
                with stopping_on_signals():
                    complete = run_experiments(chosen, folder, measure, limit_seconds=options.minutes * 60)
                status = 0 if complete else FAILED
        elif not options.table:
            print("Everything asked for has been measured before: --again repeats it.")
        for part, section in parts(read(folder, EXPERIMENTS)).items():
            if options.docs and options.name == PUBLISHED:
                fill(options.docs, "network", part, section)
            else:
                print(f"\n{section}")
    except (ResultsError, ValueError) as error:
        print(f"network.py: {error}", file=sys.stderr)
        return USER_ERROR
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
