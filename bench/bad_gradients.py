"""Long training in which one step in a hundred has a gradient that is not finite, on one worker or another.

    OMP_NUM_THREADS=1 python bench/bad_gradients.py                # 10,000 steps: real processes, and simulated workers
    OMP_NUM_THREADS=1 python bench/bad_gradients.py --steps 1000 --only real

It ends with 1 unless all replicas are equal, no parameter and no momentum holds a NaN, and every counter is what the
plan of bad gradients says.
"""

import argparse
import math
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from dlion import Distributed
from dlion.ops.bits import checksum
from dlion.simulate import Simulation

WORKERS = 4
PERIOD = 100  # steps, of which one is bad
SHAPES = ((40, 50), (500,), (60, 20), (7,))
BUCKET_BYTES = 256  # 2,048 elements: the first tensor is one bucket and the others are another, which goes on
LR = 5e-3

# name -> options; the one with overlap computes its gradients in a backward pass, as all do
KINDS: dict[str, dict[str, Any]] = {
    "majority": {},
    "average": {"method": "dlion-avg"},
    "ternary": {"zeros": "exact"},
    "generic": {"kernels": "reference"},
    "overlap": {"overlap": True},
    "skip": {"nonfinite": "skip"},
}


@dataclass(frozen=True)
class Bad:
    """One worker's gradient in one step: this element of this tensor, or all of it, is this value."""

    rank: int
    tensor: int
    element: int | None
    value: float


@cache
def bad_in(step: int) -> Bad | None:
    """What is wrong in a step, if anything is."""
    draw = random.Random(step // PERIOD)
    if draw.randrange(PERIOD) != step % PERIOD:
        return None
    tensor = draw.randrange(len(SHAPES))
    element = draw.choice([None, draw.randrange(math.prod(SHAPES[tensor]))])
    return Bad(draw.randrange(WORKERS), tensor, element, draw.choice([math.nan, math.inf, -math.inf]))


class Valley(nn.Module):
    """A quadratic with its minimum at 0, seen through noise."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList([torch.ones(shape) for shape in SHAPES])

    def backward(self, rank: int, step: int) -> None:
        """One worker's gradients in one step."""
        noise = torch.Generator().manual_seed(WORKERS * step + rank)
        bad = bad_in(step)
        terms = []
        for number, param in enumerate(self.values):
            slope = param.detach() + torch.randn(param.shape, generator=noise)
            if bad is not None and bad.rank == rank and bad.tensor == number:
                slope.view(-1)[slice(None) if bad.element is None else bad.element] = bad.value
            terms.append((param * slope).sum())
        sum(terms, torch.zeros(())).backward()

    def height(self) -> float:
        """0 at the minimum, 1 at the start."""
        return float(torch.cat([param.detach().flatten() for param in self.values]).square().mean())


def facts(model: Valley, optimizer: Distributed, states: list[Any]) -> dict[str, Any]:
    """What a worker ends with."""
    momenta = [kept["exp_avg"] for state in states for kept in state.values()]
    tensors: list[Tensor] = [param.detach() for param in model.values]
    return {
        "checksum": checksum(tensors),
        "finite": all(bool(tensor.isfinite().all()) for tensor in [*tensors, *momenta]),
        "t": optimizer.param_groups[0]["t"],
        "skipped": optimizer.stats.skipped,
        "abstentions": optimizer.stats.abstentions,
        "height": model.height(),
    }


def train_real(rank: int, kind: str, steps: int, group: Any = None) -> dict[str, Any]:
    """One of the workers, in a process group."""
    model = Valley()
    optimizer = Distributed(
        model.named_parameters(), lr=LR, process_group=group, **{"bucket_bytes": BUCKET_BYTES} | KINDS[kind]
    )
    for step in range(steps):
        optimizer.zero_grad()
        model.backward(rank, step)
        optimizer.step()
    return facts(model, optimizer, [optimizer.state])


def train_simulated(kind: str, steps: int) -> dict[str, Any]:
    """All workers, in this process."""
    model = Valley()
    options = {name: value for name, value in KINDS[kind].items() if name != "overlap"}
    simulation = Simulation(model, workers=WORKERS, lr=LR, **{"bucket_bytes": BUCKET_BYTES} | options)
    for step in range(steps):
        for rank in range(WORKERS):
            with simulation.worker(rank):
                model.backward(rank, step)
        simulation.step()
    return facts(model, simulation, [simulation.state_dict(rank)["state"] for rank in range(WORKERS)])


def faults_in(found: list[dict[str, Any]], kind: str, steps: int) -> list[str]:
    """What is wrong with what the workers ended with; nothing, if all is well."""
    bad = sum(bad_in(step) is not None for step in range(steps))
    skipped = bad if KINDS[kind].get("nonfinite") == "skip" else 0
    wanted = {"finite": True, "t": steps - skipped, "skipped": skipped, "abstentions": bad}
    wrong = []
    for rank, ends in enumerate(found):
        for name, value in {**wanted, "checksum": found[0]["checksum"]}.items():
            if ends[name] != value:
                wrong.append(f"{name} of rank {rank} is {ends[name]} instead of {value}")
        if not ends["height"] < 0.1:
            wrong.append(f"rank {rank} ends at a height of {ends['height']:.3f}")
    return wrong


def _process(rank: int, folder: str, kinds: list[str], steps: int) -> None:
    torch.set_num_threads(1)
    where = (Path(folder) / "meet").as_uri()
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=WORKERS)
    torch.save([train_real(rank, kind, steps) for kind in kinds], Path(folder) / f"rank-{rank}")
    dist.destroy_process_group()


def real(kinds: list[str], steps: int) -> list[list[dict[str, Any]]]:
    """Of each kind what every process ended with."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (folder, kinds, steps), nprocs=WORKERS)
        ends = [torch.load(Path(folder) / f"rank-{rank}", weights_only=True) for rank in range(WORKERS)]
    return [list(each) for each in zip(*ends, strict=True)]


def main(arguments: list[str]) -> int:
    """Run, print a table, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--only", choices=["real", "simulated"])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    given = parser.parse_args(arguments)
    bad = sum(bad_in(step) is not None for step in range(given.steps))
    print(f"{given.steps:,} steps of {WORKERS} workers, {bad} of them with a gradient that is not finite on one worker")
    print(f"{'':10} {'kind':9} {'t':>6} {'skipped':>7} {'abstained':>9} {'height':>7}  result", flush=True)
    worst = 0
    for where in ("real", "simulated"):
        if given.only not in (None, where):
            continue
        began = time.monotonic()
        kinds = [kind for kind in given.kinds if where == "real" or kind != "overlap"]
        found = real(kinds, given.steps) if where == "real" else [[train_simulated(k, given.steps)] for k in kinds]
        for kind, ends in zip(kinds, found, strict=True):
            wrong, first = faults_in(ends, kind, given.steps), ends[0]
            worst |= bool(wrong)
            row = f"{where:10} {kind:9} {first['t']:6} {first['skipped']:7} {first['abstentions']:9}"
            print(f"{row} {first['height']:7.4f}  {'; '.join(wrong) or 'all well'}")
        print(f"{'':10} {time.monotonic() - began:.0f} s", flush=True)
    return int(worst)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
