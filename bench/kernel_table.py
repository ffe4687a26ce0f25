"""The table of docs/benchmarks.md for the CPU kernels, from the files that bench/kernels.py --json wrote.

python bench/kernels.py --json bench/results/kernels/1.json     # several times, on an idle machine
python bench/kernel_table.py --docs docs/benchmarks.md          # medians over all files there
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from documents import fill
from kernels import TARGETS

RESULTS = Path(__file__).resolve().parent / "results" / "kernels"


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Median of each ratio over the runs, with its range, its target and whether the median reaches it."""
    lines = ["| ratio | median | range | target | reached |", "|---|---|---|---|---|"]
    for name in runs[0]["ratios"]:
        values = [run["ratios"][name] for run in runs]
        median = statistics.median(values)
        target = TARGETS.get(name, "")
        word = ("yes" if reaches(median, target) else "**no**") if target else ""
        lines.append(f"| {name} | {median:.3f} | {min(values):.3f} to {max(values):.3f} | {target} | {word} |")
    settings = runs[0]["settings"]
    lines += [
        "",
        f"`python bench/kernels.py`, {len(runs)} runs; {settings['used']}, {float(settings['params']):,.0f} "
        f"{settings['dtype']} parameters, {settings['threads']} thread, torch {settings['torch']}.",
    ]
    return "\n".join(lines)


def reaches(value: float, target: str) -> bool:
    """Whether a value satisfies a target such as '<= 0.78'."""
    sense, limit = target.split()
    return {"<=": value <= float(limit), ">=": value >= float(limit)}[sense]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files")
    parser.add_argument("--docs", type=Path, help="write the table between the marks of this file")
    options = parser.parse_args(arguments)
    files = sorted(options.results.glob("*.json"))
    if not files:
        print(f"kernel_table.py: there is no JSON file in {options.results}: run bench/kernels.py.", file=sys.stderr)
        return 2
    section = table([json.loads(file.read_text(encoding="utf-8")) for file in files])
    if options.docs:
        fill(options.docs, "kernels", "cpu", section)
    else:
        print(section)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
