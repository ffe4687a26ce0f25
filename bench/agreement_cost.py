"""What it costs to be sure: headers, comparisons and agreement rates, inside the step of a GPT of 5 M.

    python bench/agreement_cost.py                      # two workers, 20 steps after 10
    python bench/agreement_cost.py --workers 4 --steps 40

Each part has a timer of its own, around the functions that do it. A comparison of replicas is done at the end, several
times, and counts for a hundredth of a step, as often as it is done by default; that of gradients, in three steps of a
hundred, is timed in the first three. Waiting for the others inside a part is told
apart: who waits there would else wait for ballots. The target is 2 % of a step for all parts together.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dlion
from dlion import exchange, tallies
from dlion.agreement_rates import AgreementRates, Sample
from dlion.channel import Call
from dlion.comparison import GUARDED_EVERY, Guard
from dlion.header import BallotHeader, VerdictHeader
from dlion.tallies import Tally
from dlion.train.bench.model import batch_of, build_gpt, loss_of
from dlion.train.bench.settings import BenchConfig
from dlion.verification import Verification

TARGET = 0.02
BEFORE = 10  # steps that are not measured
COMPARISONS = 5
EVERY = 100  # steps between two comparisons, by default
GRADIENTS = "comparing gradients"


class Timers:
    """Seconds in each part, and seconds of waiting within it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        self._inside: list[str] = []

    def around(self, owner: Any, name: str, part: str) -> None:
        """Time every call of this function for `part`; not again inside another one's."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return inner(*args, **kwargs)
            self._inside.append(part)
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._inside.pop()
                self.spent[part] = self.spent.get(part, 0.0) + time.perf_counter() - began

        setattr(owner, name, staticmethod(timed) if name == "decode" else timed)

    def forget(self, but: str) -> None:
        """Begin anew, with all parts but one."""
        self.spent, self.waited = ({but: seconds.get(but, 0.0)} for seconds in (self.spent, self.waited))

    def around_waits(self) -> None:
        """Time what is waited for inside the parts."""
        inner = Call.wait

        def wait(call: Call[Any]) -> Any:
            began = time.perf_counter()
            try:
                return inner(call)
            finally:
                for part in self._inside:
                    self.waited[part] = self.waited.get(part, 0.0) + time.perf_counter() - began

        Call.wait = wait  # type: ignore[method-assign]


def measured(rank: int, workers: int, steps: int, folder: str, results: Any) -> None:
    """One worker: seconds of a step, and of each part per step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=workers)
    config, device = BenchConfig(), torch.device("cpu")
    model = dlion.local_gradients(build_gpt(config, device))
    optimizer = dlion.DistributedLion(model.named_parameters(), lr=1e-4, topology="sharded")
    timers = Timers()
    for owner, name in ((BallotHeader, "encode"), (VerdictHeader, "decode"), (exchange, "worst"), (Tally, "judge")):
        timers.around(owner, name, "headers")
    timers.around(tallies, "judge", "headers")
    for owner, name in ((Sample, "take"), (AgreementRates, "close")):
        timers.around(owner, name, "agreement rates")
    timers.around(Verification, "compare", "verification")
    timers.around(Guard, "look", GRADIENTS)
    timers.around_waits()
    batch = batch_of(config, rank, device)
    seconds = []
    for step in range(BEFORE + steps):
        if step == BEFORE:
            timers.forget(but=GRADIENTS)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    for _ in range(COMPARISONS):
        optimizer.verify_replicas()
    often = {"verification": COMPARISONS * EVERY, GRADIENTS: GUARDED_EVERY}
    parts = {
        part: (total / often.get(part, steps), timers.waited.get(part, 0.0) / often.get(part, steps))
        for part, total in timers.spent.items()
    }
    results.put((sum(p.numel() for p in model.parameters()), statistics.median(seconds[BEFORE:]), parts))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        shape = (arguments.workers, arguments.steps, folder, results)
        ranks = [context.Process(target=measured, args=(rank, *shape)) for rank in range(arguments.workers)]
        for process in ranks:
            process.start()
        found = [results.get(timeout=600) for _ in ranks]
        for process in ranks:
            process.join()
    numel, step = found[0][0], statistics.median(seconds for _, seconds, _ in found)
    print(f"{numel / 1e6:.1f} M parameters, {arguments.workers} workers, a step takes {1e3 * step:.1f} ms")
    whole = 0.0
    for part in found[0][2]:
        spent, waited = (statistics.mean(parts[part][k] for _, _, parts in found) for k in (0, 1))
        whole += spent
        print(
            f"{part:20} {1e3 * spent:7.3f} ms a step, {100 * spent / step:5.2f} % (of it waiting {1e3 * waited:.3f} ms)"
        )
    print(f"{'all':20} {1e3 * whole:7.3f} ms a step, {100 * whole / step:5.2f} % (target <= {100 * TARGET:.0f} %)")


if __name__ == "__main__":
    main()
