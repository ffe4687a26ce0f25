"""What one worker puts on the wire: run once in each namespace by network.py, or as a function by the tests.

    RANK=0 WORLD_SIZE=4 ... python bench/wire.py bytes --vote majority --parameters 4900000 --out FOLDER
    RANK=0 WORLD_SIZE=4 ... python bench/wire.py calls --out FOLDER

Every rank writes FOLDER/rank-RANK.json.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packets import HEADER_BYTES, SEGMENT_BYTES, counters, formula_bytes
from torch import Tensor, nn

from dlion import DistributedLion

WARM_STEPS = 4  # past the agreement and the first steps' hashes of gradients

Figures = dict[str, Any]


def parameters_of(tensors: int, elements: int) -> list[nn.Parameter]:
    """Parameters with a gradient that differs between ranks."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    made = [nn.Parameter(torch.zeros(elements)) for _ in range(tensors)]
    for param in made:
        param.grad = torch.randn(elements, generator=generator)
    return made


def bytes_of_steps(interface: str, vote: str, parameters: int, steps: int) -> Figures:
    """Bytes per step of this worker: on the interface, without headers, by dlion's counters and by the formula."""
    opt = DistributedLion(parameters_of(1, parameters), vote=vote, topology="sharded")
    for _ in range(WARM_STEPS):
        opt.step()
    dist.barrier()
    before, counted = counters(interface), opt.stats.bytes_sent
    for _ in range(steps):
        opt.step()
    # Everybody is at its end before anybody reads: the barrier's packets are few, and a rank's last ones are all there.
    dist.barrier()
    moved = counters(interface) - before
    return {
        "interface_sent": moved.sent / steps,
        "interface_received": moved.received / steps,
        "payload_sent": (moved.sent - HEADER_BYTES * moved.packets_sent) / steps,
        "payload_received": (moved.received - HEADER_BYTES * moved.packets_received) / steps,
        "packets_sent": moved.packets_sent / steps,
        "packets_received": moved.packets_received / steps,
        "repeated": SEGMENT_BYTES * moved.segments_repeated / steps,
        "counted": (opt.stats.bytes_sent - counted) / steps,
        "formula": formula_bytes(dist.get_world_size(), vote, parameters),
        "kernels": opt.kernels,
    }


def calls_of_tensors(rounds: int) -> Figures:
    """1 M parameters as 1, 10 and 1,000 tensors: collective calls per step, and times of `step()` interleaved.

    Beside it torch's fused AdamW on the same tensors. A time is the slowest worker's, the median of all rounds.
    """
    counts = (1, 10, 1000)
    lions = {n: DistributedLion(parameters_of(n, 1_000_000 // n)) for n in counts}
    adams = {n: torch.optim.AdamW(parameters_of(n, 1_000_000 // n), fused=True) for n in counts}
    subjects: dict[str, Callable[[], object]] = {}
    for n in counts:
        subjects[f"dlion_seconds_{n}"] = lions[n].step
        subjects[f"adamw_seconds_{n}"] = adams[n].step
    for _ in range(WARM_STEPS):
        for step in subjects.values():
            step()
    before = {n: lions[n].stats.calls for n in counts}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, step in subjects.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    figures = {name: statistics.median(_slowest(seconds)) for name, seconds in times.items()}
    calls = {f"calls_{n}": (lions[n].stats.calls - before[n]) / rounds for n in counts}
    return figures | calls | {"kernels": lions[1].kernels}


def _slowest(seconds: Sequence[float]) -> list[float]:
    """The slowest worker's time of each round."""
    times: Tensor = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bytes", "calls"])
    parser.add_argument("--vote", choices=["majority", "average"], default="majority")
    parser.add_argument("--parameters", type=int, default=4_900_000)
    parser.add_argument("--steps", type=int, default=10, help="steps (bytes) or rounds (calls) that are measured")
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if options.what == "bytes":
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        figures = bytes_of_steps(interface, options.vote, options.parameters, options.steps)
    else:
        figures = calls_of_tensors(options.steps)
    options.out.mkdir(exist_ok=True)
    (options.out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
