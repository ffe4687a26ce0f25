"""Steps of 1,000 tensors of 1,000 elements against one tensor of a million, on four local processes.

    python bench/small_tensors.py

One thread each; a step takes as long as on its slowest worker. Beside it is fused AdamW's own ratio, on one of the
processes while the others wait.
"""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from dlion import DistributedLion

WORKERS = 4
ROUNDS, WARM_UP = 60, 10
SHAPES = {"one": (1, 1_000_000), "many": (1000, 1000)}
RATIO = f"step() of 1,000 x 1,000 / 1 x 1,000,000, N={WORKERS}"
FUSED = "the same, fused AdamW"


def ratios(kernels: str = "auto") -> dict[str, float]:
    """The two ratios, of medians."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, (folder, kernels), nprocs=WORKERS)
        medians: dict[str, float] = torch.load(Path(folder) / "medians")
    return {
        RATIO: medians["dlion many"] / medians["dlion one"],
        FUSED: medians["AdamW many"] / medians["AdamW one"],
    }


def _work(rank: int, folder: str, kernels: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # gradients are equal here, which dlion takes for a mistake
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORKERS)
    steps: dict[str, Callable[[], object]] = {}
    for name, shape in SHAPES.items():
        steps[f"dlion {name}"] = DistributedLion(_tensors(*shape), lr=1e-6, kernels=kernels).step
        steps[f"AdamW {name}"] = torch.optim.AdamW(_tensors(*shape), lr=1e-6, fused=True).step
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            if rank == 0 or not name.startswith("AdamW"):
                step()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            taken[name].append(float(seconds))
    if rank == 0:
        torch.save({name: statistics.median(times[WARM_UP:]) for name, times in taken.items()}, f"{folder}/medians")
    dist.barrier()
    dist.destroy_process_group()


def _tensors(count: int, size: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(size, generator=generator)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(size, generator=generator)
    return params


if __name__ == "__main__":
    for subject, ratio in ratios().items():
        print(f"  {subject:58}{ratio:8.3f}")
