"""The tables of docs/plan.md: what `dlion plan`'s model says of the steps that bench/network.py measured.

    python bench/plan_table.py                       print them
    python bench/plan_table.py --docs docs/plan.md   write them between the marks of this file

What goes into a prediction comes from the same run or its configuration, and never from the step that is predicted: the
link's rate, seconds of the step without communication, the bare exchange of one vote's rows, calls that carry 8 bytes,
DDP's bucket size. Kernels take what bench/kernels.py measured, as many times as long as workers share a core.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from documents import fill
from network_experiments import EXPERIMENTS, ROOT, Experiment
from network_results import read
from packets import HEADERS_LEAST

from dlion.train.bench.model import build_gpt
from dlion.train.bench.settings import BenchConfig
from dlion.train.plan.cluster import GLOO, Cluster, Link
from dlion.train.plan.methods import ALONE, METHODS, Scene
from dlion.train.plan.rates import Rates
from dlion.train.plan.sizes import Sizes
from dlion.train.plan.work import Compute, Step, step_of

Record = dict[str, Any]
RESULTS = ROOT / "bench" / "results" / "network"

PLANNED = {  # contender of `dlion bench` -> method of `dlion plan`
    "ddp fp32": "ddp-fp32",
    "ddp fp16": "ddp-fp16",
    "dlion": "dlion-mavo",
    "dlion overlap": "dlion-mavo, overlap",
    "powersgd 2": "ddp-powersgd",
}
JUDGED_LINKS = ("loopback", "1gbit", "100mbit")
JUDGED = ("ddp fp32", "ddp fp16", "dlion")
WITHIN = 0.20
ABSENT = "not measured"
NO_TIME = Compute(0.0, 0.0)


@dataclass(frozen=True)
class Comparison:
    """One contender of one experiment: medians over its runs. `sent` is what the plan says, `counted` what was."""

    experiment: Experiment
    contender: str
    planned: float
    measured: float
    sent: float
    counted: float

    @property
    def deviation(self) -> float:
        """Of the plan, as a share of what was measured."""
        return self.planned / self.measured - 1

    @property
    def is_judged(self) -> bool:
        """Whether it is one of those that must be within 20 %."""
        return self.experiment.name.removesuffix("-2") in JUDGED_LINKS and self.contender in JUDGED


def planned(experiment: Experiment, run: Record, contender: str) -> Step:
    """What the model says of a contender's step, from the other measurements of its run."""
    settings, workers = run["settings"], run["workers"]
    sizes = _sizes(settings["width"], settings["layers"], settings["tokens"])
    busy = workers * run["environment"]["threads"] / run["environment"]["cores"]
    rates = Rates().slowed(max(1.0, busy))
    cap = run["contenders"][contender].get("bucket_cap_mb", Scene.bucket_cap_mb)
    scene = Scene(sizes, workers, rates, bucket_cap_mb=cap)
    # without a wire the cores move the bytes, and hide nothing unless one is idle
    hides = experiment.rate is not None or busy < 1
    return step_of(METHODS[PLANNED[contender]](scene), _cluster(experiment, run, scene), _compute(run, scene, hides))


@cache
def _sizes(width: int, layers: int, tokens: int) -> Sizes:
    with torch.device("meta"):
        model = build_gpt(BenchConfig(width=width, layers=layers, tokens=tokens), torch.device("meta"))
    return Sizes.of("bench", [tuple(param.shape) for param in model.parameters()])


def _cluster(experiment: Experiment, run: Record, scene: Scene) -> Cluster:
    """Every worker is a node. A hop's latency is that of the small all-reduce, which takes 2(N-1) of them. The rate is
    the link's own without headers; where there is no wire, what the bare exchange has when the latency of its calls is
    over. Messages' overhead is what makes the model's bare exchange as long as the measured one: congestion and TCP's
    slow start, which long transfers do not feel, and what calls cost cores.
    """
    workers, bare, latency = run["workers"], run["bare_exchange"], run["latency"]
    vote = METHODS["dlion-mavo"](scene)
    if experiment.rate is None:
        calls = sum(count * len(piece.calls) for count, piece in vote.pieces)
        rate = bare["payload"] / (bare["seconds"] - calls * latency["vote_call"])
    else:
        rate = experiment.rate / 8 / (1 + HEADERS_LEAST)
    link = Link(latency["all_reduce"] / (2 * (workers - 1)), rate)
    free, heavy = (Cluster(workers, 1, link, link, overhead, GLOO) for overhead in (0.0, 1.0))
    without, with_one = (step_of(vote, cluster, NO_TIME).exchange for cluster in (free, heavy))
    return replace(free, overhead=max(0.0, bare["seconds"] - without) / (with_one - without))


def _compute(run: Record, scene: Scene, hides: bool) -> Compute:
    """The step without communication, less AdamW."""
    found = run["contenders"][ALONE]
    parts = found["parts"]
    seconds = found["seconds"] - scene.adamw
    backward = seconds * parts["backward"] / (parts["forward"] + parts["backward"]) if hides else 0.0
    return Compute(seconds - backward, backward)


def compared(results: dict[str, Record]) -> Iterator[Comparison]:
    """Every contender of every experiment with whole steps that has finished."""
    for experiment in EXPERIMENTS:
        if experiment.command[0] != "-m" or experiment.name not in results:
            continue
        runs = results[experiment.name]["figures"]["runs"]
        for contender in PLANNED:
            if contender in runs[0]["contenders"]:
                steps = [planned(experiment, run, contender) for run in runs]
                found = [run["contenders"][contender] for run in runs]
                counted = [one["sent_by_formula"] if one["sent"] is None else one["sent"] for one in found]
                yield Comparison(
                    experiment,
                    contender,
                    statistics.median(step.seconds for step in steps),
                    statistics.median(one["seconds"] for one in found),
                    statistics.median(step.sent for step in steps),
                    statistics.median(counted),
                )


def judged_rows(found: Sequence[Comparison]) -> list[str]:
    """What must be within 20 %: three links, two numbers of workers, three methods."""
    rows = _head(["link", "workers", "method", "plan, ms", "measured, ms", "deviation", f"within {WITHIN:.0%}"])
    for suffix, workers in (("-2", 2), ("", 4)):
        for link in JUDGED_LINKS:
            for contender in JUDGED:
                one = next((o for o in found if (o.experiment.name, o.contender) == (link + suffix, contender)), None)
                title = next(each.title for each in EXPERIMENTS if each.name == link)
                name = PLANNED[contender]
                if one is None:
                    rows.append(_row([title, str(workers), name, "", ABSENT, "", ""]))
                else:
                    word = "yes" if abs(one.deviation) <= WITHIN else "**no**"
                    rows.append(_row([title, str(workers), name, *_figures(one), word]))
    return rows


def other_rows(found: Sequence[Comparison]) -> list[str]:
    """What else was measured."""
    rows = _head(["link", "workers", "method", "plan, ms", "measured, ms", "deviation"])
    for one in found:
        if not one.is_judged:
            title = one.experiment.title.removesuffix(f", {one.experiment.workers} workers")
            rows.append(_row([title, str(one.experiment.workers), PLANNED[one.contender], *_figures(one)]))
    return rows


def _figures(one: Comparison) -> list[str]:
    return [_three(1e3 * one.planned), _three(1e3 * one.measured), f"{one.deviation:+.1%}"]


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(cells: Sequence[str]) -> list[str]:
    return [_row(cells), "|" + "---|" * len(cells)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that bench/network.py wrote")
    parser.add_argument("--docs", type=Path, help="write the tables between the marks of this file")
    options = parser.parse_args(arguments)
    found = list(compared(read(options.results, EXPERIMENTS)))
    if not found:
        print(f"plan_table.py: no whole step was measured in {options.results}: run bench/network.py.", file=sys.stderr)
        return 2
    for part, rows in (("judged", judged_rows(found)), ("others", other_rows(found))):
        if options.docs:
            fill(options.docs, "plan", part, "\n".join(rows))
        else:
            print("\n".join(["", *rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
