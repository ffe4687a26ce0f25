"""What is measured on which link, and the targets. One experiment is one command, run on all workers, several times."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import links
from links import Place, bits_per_second, burst_bytes
from workers import run_workers

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "bench-runs"  # where `dlion bench` writes too: every run's page may be looked at
Record = dict[str, Any]

# The defaults of `dlion bench` are the model of the targets: a GPT of 4.9 M parameters, 2 x 64 tokens a worker.
BENCH = ("-m", "dlion", "bench")
WIRE = ("bench/wire.py",)
FEW = "--contenders no-communication ddp-fp32 powersgd-2 dlion dlion-overlap"


class RefusedError(Exception):
    """A run that must not become a figure; a sentence for the user."""


@dataclass(frozen=True)
class Experiment:
    """`link`: 'loopback' (one machine), 'segments' (as fast as the machine, packets as on a wire) or a rate.

    `runs` are the repetitions whose median counts, `seconds` the limit of one run, `command` what python is given.
    """

    name: str
    title: str
    link: str
    command: tuple[str, ...]
    workers: int = 4
    runs: int = 3
    seconds: float = 120.0

    @property
    def rate(self) -> float | None:
        """Bit/s that the link was shaped to, None if it was not."""
        return None if self.link in OPEN_LINKS else bits_per_second(self.link)

    @property
    def config(self) -> Record:
        """Everything that a result depends on, but for the machine."""
        burst = None if self.link in OPEN_LINKS else burst_bytes(self.link)
        return {**asdict(self), "command": list(self.command), "burst_bytes": burst}


OPEN_LINKS: dict[str, Callable[[int], AbstractContextManager[list[Place]]]] = {
    "loopback": links.loopback,
    "segments": lambda workers: links.shaped(workers, "none", segment_like_a_wire=True),
}


def steps(name: str, title: str, link: str, flags: str, **more: Any) -> Experiment:
    return Experiment(name, title, link, (*BENCH, *flags.split()), **more)


def bytes_of(vote: str, workers: int) -> Experiment:
    title = f"bytes of a step, {vote}, {workers} workers"
    return Experiment(f"bytes-{vote}-{workers}", title, "segments", (*WIRE, "bytes", "--vote", vote), workers, runs=1)


EXPERIMENTS = (
    Experiment("tensors", "step() of 1, 10 and 1,000 tensors", "loopback", (*WIRE, "calls", "--steps", "50")),
    *(bytes_of(vote, workers) for vote in ("majority", "average") for workers in (2, 4, 8)),
    bytes_of("majority", 16),
    steps("loopback", "loopback", "loopback", "--seconds 25"),
    steps("1gbit", "1 Gbit/s", "1gbit", "--seconds 30"),
    steps("100mbit", "100 Mbit/s", "100mbit", "--seconds 90", seconds=240.0),
    # More sequences: a backward pass four times as long, and the same bytes. With 8, it is 3.5 times as long.
    steps("100mbit-long", "100 Mbit/s, batch of 9", "100mbit", f"--batch-size 9 --bucket-cap-mb 5 --seconds 60 {FEW}"),
    # A step of DDP takes 25 s here, and so does each copy of the model at the start: one run, one bucket size, and as
    # few rounds as `dlion bench` takes.
    steps("10mbit", "10 Mbit/s", "10mbit", f"--bucket-cap-mb 25 --seconds 60 {FEW}", runs=1, seconds=600.0),
    # For the plan, whose model must hold for other numbers of workers too.
    steps("loopback-2", "loopback, 2 workers", "loopback", "--seconds 20", workers=2),
    steps("1gbit-2", "1 Gbit/s, 2 workers", "1gbit", "--seconds 25", workers=2),
    steps("100mbit-2", "100 Mbit/s, 2 workers", "100mbit", "--seconds 60", workers=2, seconds=240.0),
)


@dataclass(frozen=True)
class Target:
    """Seconds of `slow` over seconds of `fast`, of one run; the median of the experiment's runs is held to `limit`."""

    experiment: str
    slow: str
    fast: str
    sense: Literal[">=", "<="]
    limit: float

    def reached(self, ratio: float) -> bool:
        return ratio >= self.limit if self.sense == ">=" else ratio <= self.limit


TARGETS = (
    Target("loopback", "ddp fp32", "dlion", ">=", 1.35),
    Target("1gbit", "ddp fp32", "dlion", ">=", 2.5),
    Target("1gbit", "powersgd 2", "dlion", ">=", 1.5),
    Target("100mbit", "ddp fp32", "dlion", ">=", 12),
    Target("100mbit", "ddp fp16", "dlion", ">=", 6.5),
    Target("100mbit", "powersgd 2", "dlion", ">=", 1.3),
    Target("100mbit", "dlion overlap", "no communication", "<=", 1.5),
    Target("100mbit-long", "dlion overlap", "no communication", "<=", 1.15),
    Target("10mbit", "ddp fp32", "dlion", ">=", 25),
)


def places_of(experiment: Experiment) -> AbstractContextManager[list[Place]]:
    """The experiment's workers on its link, as a context."""
    if experiment.link in OPEN_LINKS:
        return OPEN_LINKS[experiment.link](experiment.workers)
    return links.shaped(experiment.workers, experiment.link)


def measure(experiment: Experiment, run: int) -> Record:
    """One run: the figures of all ranks (wire.py), or bench.json (dlion bench). Its folder stays in bench-runs/.

    Raises: LinkError, WorkerError; RefusedError when the link was slower on paper than in fact.
    """
    out = PAGES / f"network-{experiment.name}-{run}"
    shutil.rmtree(out, ignore_errors=True)  # of an earlier call; its figures are in the results
    PAGES.mkdir(exist_ok=True)
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *experiment.command, "--out", str(out.relative_to(ROOT))]
    with places_of(experiment) as places:
        run_workers(places, command, experiment.seconds, {"PYTHONPATH": python_path}, ROOT)
    figures = read_figures(out, experiment.workers)
    check_link(experiment, figures)
    return figures


def read_figures(folder: Path, workers: int) -> Record:
    whole = folder / "bench.json"
    if whole.exists():
        figures: Record = json.loads(whole.read_text(encoding="utf-8"))
        return figures
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(workers)]
    return {"ranks": ranks}


def check_link(experiment: Experiment, figures: Record) -> None:
    """Raises: RefusedError when the bare exchange moved its payload faster than the link's rate allows."""
    rate, exchange = experiment.rate, figures.get("bare_exchange")
    if rate is None:
        return
    if not exchange:
        raise RefusedError(f"{experiment.name}: the run has no bare exchange, so nothing shows that its link was held.")
    moved = 8 * exchange["payload"] / exchange["seconds"]
    if moved > rate:
        raise RefusedError(
            f"{experiment.name}: the bare exchange moved {exchange['payload']} bytes in {exchange['seconds']:.4g} s, "
            f"{moved / 1e6:.4g} Mbit/s over a link of {rate / 1e6:g} Mbit/s, so the link was not what it is called: "
            "this run is refused."
        )
