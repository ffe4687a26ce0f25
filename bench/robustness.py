"""How many lying workers a vote survives: runs in which f of N send inverted, random or colluding votes.

    python bench/robustness.py --out docs/results/robustness     # about 30 core-minutes; goes on where it was
    python bench/robustness_page.py --docs docs/robustness.md    # its tables and curves

Each finished run is a line of cells.jsonl. A run reaches the target when its validation loss comes down, at any of its
evaluations, to what the honest run (same method, N and seed) has after half of its steps.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from documents import write_whole
from torch import nn

from dlion.agreement_rates import ties_out
from dlion.codecs import Cast, SignBits, TernaryBits
from dlion.pipeline import Wire
from dlion.simulate import Fault, Simulation
from dlion.simulate.faults import COLLUDING, INVERTED, RANDOM
from dlion.train.config import Settled, learning_rate, settle
from dlion.train.config import TrainConfig as Config
from dlion.train.models import build_model
from dlion.train.reading import Reading
from dlion.train.tasks import Task, load_task

HONEST = "honest"
CONTEXT, WINDOWS = 64, 128
# Model, batch and rates of docs/studies/text.toml, whose grid chose the rates with 4 honest workers.
RATES = {"dlion-mavo": 0.001, "dlion-avg": 0.003}
SEEDS = (42, 52)
SHOWN = 2  # liars in `--agreement`
# f around where a run could fail: a majority and one more; more of the random ones, since they cancel one another.
LIARS: dict[int, dict[str, tuple[int, ...]]] = {
    7: {INVERTED: (1, 2, 3, 4), RANDOM: (2, 3, 4, 5, 6), COLLUDING: (1, 2, 3, 4)},
    15: {INVERTED: (1, 2, 3, 4, 5, 6, 7, 8), RANDOM: (3, 5, 7, 9, 11, 13), COLLUDING: (1, 2, 3, 4, 5, 6, 7)},
}


@dataclass(frozen=True)
class Cell:
    """One run: the lowest `liars` ranks of `workers` have the fault `attack` in every step."""

    method: str
    workers: int
    attack: str
    liars: int
    seed: int


def plan() -> Iterator[Cell]:
    """Every run, those of the first seed first, honest ones before those that are held to them."""
    for seed in SEEDS:
        for workers, attacks in LIARS.items():
            for method in RATES:
                yield Cell(method, workers, HONEST, 0, seed)
                for attack, counts in attacks.items():
                    for liars in counts:
                        yield Cell(method, workers, attack, liars, seed)


def settings(steps: int) -> dict[str, Any]:
    """What all runs have in common, in the flags of `dlion train`."""
    sizes = {"layers": 2, "heads": 4, "width": 64, "hidden": 176}
    run = {"task": "text", "model": "gpt", **sizes, "context": CONTEXT, "eval_windows": WINDOWS}
    return {
        **run,
        "batch_size": 4,
        "schedule": "cosine",
        "steps": steps,
        "eval_every": max(steps // 10, 1),
        "lr": RATES,
    }


def config_of(cell: Cell, common: dict[str, Any]) -> Settled:
    """The flags of `dlion train` that this run would have, but for its liars."""
    given = {**common, "method": cell.method, "lr": common["lr"][cell.method], "seed": cell.seed}
    return settle(Config(**given), model=given["model"], workers=cell.workers, steps_per_epoch=1)


def run(cell: Cell, config: Settled, task: Task) -> dict[str, Any]:
    """Train, and judge the model every `eval_every` steps: the run's line of cells.jsonl."""
    began = time.perf_counter()
    torch.manual_seed(cell.seed)
    model = build_model(config.model, task, config)
    faults = [Fault(cell.attack, range(cell.liars))] if cell.liars else []
    simulation = Simulation(model, cell.method, config.lr, config.betas, workers=cell.workers, faults=faults)
    # What these send does not depend on what they compute.
    idle = range(cell.liars) if cell.attack in (RANDOM, COLLUDING) else range(0)
    steps, losses = [], []
    for step in range(config.steps + 1):
        if step % config.eval_every == 0:
            summed, _, count = task.evaluate(model, rank=0, workers=1, device=torch.device("cpu")).tolist()
            steps.append(step)
            losses.append(summed / count)
        if step == config.steps:
            break
        simulation.param_groups[0]["lr"] = learning_rate(config, step + 1)
        for rank in range(cell.workers):
            with simulation.worker(rank):
                if rank not in idle:
                    how = {"seed": cell.seed, "rank": rank, "workers": cell.workers, "step": step + 1}
                    task.loss(model, *task.batch(**how, size=config.batch_size)).backward()
        simulation.step()
    told = {"agreement": simulation.stats.agreement, "seconds": time.perf_counter() - began}
    return {**asdict(cell), "step": steps, "val_loss": losses, **told}


def chance(wire: Wire, workers: int) -> float | None:
    """How often the vote of one of `workers` coins is what they all decide; None where nothing is counted.

    Its own vote is among those that decide, so this is more than half. Among workers that agree with each other a coin
    is less often on the winning side: what is counted says how often.
    """
    if not isinstance(wire.up, SignBits | TernaryBits | Cast):
        return None
    if isinstance(wire.up, Cast):  # numbers with a normal distribution, and the sign of their sum
        return 0.5 + math.asin(1 / math.sqrt(workers)) / math.pi
    outcomes = [up for up in range(workers + 1) if not (ties_out(wire) and 2 * up == workers)]
    cases = [math.comb(workers, up) for up in outcomes]
    with_it = [case * max(up, workers - up) for case, up in zip(cases, outcomes, strict=True)]
    return sum(with_it) / workers / sum(cases)


def agreement(common: dict[str, Any], task: Task) -> str:
    """How liars show in `stats.agreement`: what the lowest of them and the lowest honest worker have after the run."""
    lines = [
        "| attack | liars of 7 | method | a liar agrees | an honest worker agrees | coins would |",
        "|---|---|---|---|---|---|",
    ]
    for attack in LIARS[7]:
        for method in RATES:
            cell = Cell(method, 7, attack, SHOWN, SEEDS[0])
            simulation = Simulation(nn.Linear(1, 1), method, workers=7)
            by_chance = chance(simulation._team.wire, 7) or 0.0
            rates = run(cell, config_of(cell, common), task)["agreement"]
            numbers = " | ".join(f"{100 * rate:.1f} %" for rate in (rates[0], rates[SHOWN], by_chance))
            lines.append(f"| {attack} | {SHOWN} | {method} | {numbers} |")
    return "\n".join(lines)


def found(folder: Path) -> dict[Cell, dict[str, Any]]:
    """The finished runs of a folder; a last line cut short by a crash is left out."""
    file = folder / "cells.jsonl"
    lines = file.read_text("utf-8").split("\n")[:-1] if file.is_file() else []
    records = [json.loads(line) for line in lines]
    return {Cell(**{name: record[name] for name in Cell.__dataclass_fields__}): record for record in records}


def prepare(folder: Path, facts: dict[str, Any]) -> None:
    """Make the folder, or see that its runs had these settings and data. Raises: ValueError: they had others."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "settings.json"
    if kept.is_file() and json.loads(kept.read_text("utf-8")) != facts:
        raise ValueError(f"{folder} holds runs with other settings (settings.json): take another --out.")
    write_whole(kept, json.dumps(facts, indent=2) + "\n")
    cells = folder / "cells.jsonl"
    if cells.is_file():
        whole = cells.read_text("utf-8")
        write_whole(cells, whole[: whole.rfind("\n") + 1])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-runs/robustness"))
    parser.add_argument("--steps", type=int, default=200, help="of each run (default 200)")
    parser.add_argument("--most", type=int, default=10**6, help="stop after so many runs (default: all)")
    parser.add_argument(
        "--agreement", action="store_true", help="only show how two of seven liars agree with the others"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # gradients, and so the figures, depend on it
    common = settings(options.steps)
    try:
        task = load_task("text", None, Reading(context=CONTEXT, eval_windows=WINDOWS))
        if options.agreement:
            print(agreement(common, task))
            return 0
        prepare(options.out, {**common, "data": {"name": task.info.name, "sha256": task.info.sha256}})
    except ValueError as error:
        print(f"robustness.py: {error}", file=sys.stderr)
        return 2
    done = found(options.out)
    todo = [cell for cell in plan() if cell not in done][: options.most]
    for number, cell in enumerate(todo, 1):
        record = run(cell, config_of(cell, common), task)
        with (options.out / "cells.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{number}/{len(todo)} {cell}: {record['val_loss'][-1]:.4f}, {record['seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
