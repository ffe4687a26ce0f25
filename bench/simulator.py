"""What a simulated step costs over the forward and backward passes in it, and how much memory it takes.

    OMP_NUM_THREADS=1 python bench/simulator.py                 # 64 workers on the small GPT, about half a minute
    OMP_NUM_THREADS=1 python bench/simulator.py --method g-lion --workers 16

In turns, on the same batches: as many passes as there are workers and nothing else, and a step of the simulation.
"""

import argparse
import resource
import statistics
import sys
import time

import torch
from torch import nn

from dlion.methods import METHODS
from dlion.simulate import Simulation
from dlion.train.models import build_model
from dlion.train.tasks import Task, load_task

MB = 1e6
KIB = 1024  # in which Linux counts resident memory


def peak() -> int:
    """The most resident memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


class Passes:
    """Forward and backward passes over one batch for each worker, made before anything is measured."""

    def __init__(self, task: Task, model: nn.Module, workers: int, batch_size: int) -> None:
        self._task, self._model = task, model
        self._batches = [
            task.batch(seed=0, rank=rank, workers=workers, step=0, size=batch_size) for rank in range(workers)
        ]

    def of(self, rank: int) -> None:
        """One worker's."""
        self._task.loss(self._model, *self._batches[rank]).backward()

    def alone(self) -> float:
        """Seconds for all workers', without an optimizer."""
        began = time.perf_counter()
        for rank in range(len(self._batches)):
            self._model.zero_grad(set_to_none=True)
            self.of(rank)
        return time.perf_counter() - began

    def simulated(self, simulation: Simulation) -> float:
        """Seconds for a step of the simulation."""
        began = time.perf_counter()
        for rank in range(simulation.workers):
            with simulation.worker(rank):
                self.of(rank)
        simulation.step()
        return time.perf_counter() - began


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64, help="simulated workers (default 64)")
    parser.add_argument("--method", default="dlion-mavo", choices=METHODS)
    parser.add_argument("--batch-size", type=int, default=8, help="windows of 128 bytes for each worker (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="of both, in turns, after one to warm up (default 3)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    task = load_task("text")
    torch.manual_seed(0)
    model = build_model(None, task)
    passes = Passes(task, model, options.workers, options.batch_size)
    passes.alone()
    before = peak()  # a pass with its activations, and all batches
    simulation = Simulation(model, options.method, workers=options.workers)
    passes.simulated(simulation)
    simulation.phases.start()
    rounds = [(passes.alone(), passes.simulated(simulation)) for _ in range(options.rounds)]

    params = sum(param.numel() for param in model.parameters())
    alone, simulated = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratios = sorted(simulated / alone for alone, simulated in rounds)
    print(
        f"{options.workers} simulated workers, {options.method}, GPT of {params:,} parameters, {options.batch_size} "
        f"windows of 128 bytes each, {torch.get_num_threads()} thread(s), {simulation.kernels} kernels"
    )
    print(f"passes alone {alone:.2f} s, simulated step {simulated:.2f} s (medians of {options.rounds} rounds)")
    print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    phases = {name: seconds / options.rounds for name, seconds in simulation.phases.seconds.items()}
    print("of a step: " + ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in phases.items() if seconds))
    print(
        f"peak memory {peak() / MB:,.0f} MB, of which {(peak() - before) / MB:,.0f} MB came with the simulation; "
        f"{options.workers} momenta in float32 are {4 * params * options.workers / MB:,.0f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
