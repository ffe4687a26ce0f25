"""How fast kernels and steps are on a device: against a copy of its memory, fused AdamW, and DDP between several."""

import gc
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks import Row, placed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dlion
from dlion.errors import AgreementError
from dlion.options import DEVICE_BUCKET_BYTES

TENSOR = 2**26  # elements of a large tensor
BUCKET = 8 * DEVICE_BUCKET_BYTES  # elements of a bucket, as a step there takes them
COPY_SHARE = 0.90  # of the rate of a copy, which each kernel must reach
ADAMW_SHARE = 0.80  # of the seconds of fused AdamW, which ballot and apply may take
VOTERS = (8, 64, 512)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def medians(what: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Seconds of each, measured in turn; each runs once before it is timed."""
    taken: dict[str, list[float]] = {name: [] for name in what}
    for number in range(rounds + 1):
        for name, run in what.items():
            run()
            wait(device)
            began = time.perf_counter()
            run()
            wait(device)
            if number:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in taken.items()}


def kernel_rates(kernels: ModuleType, device: torch.device, numel: int, rounds: int) -> Iterator[Row]:
    """Each kernel's bytes per second, beside those of a copy, and the tallies of many."""
    words = numel // 64
    grad, param = (torch.randn(numel, device=device) for _ in range(2))
    momentum, narrow = torch.randn(numel, device=device), torch.randn(numel, device=device).bfloat16()
    verdict = _words(device, 1, words)

    def ballot(kept: Tensor) -> None:
        kernels.ballot([grad], [kept], [0], [0], numel, [0.9], [0.99], [False], 0, 3, 0, "balanced")

    def apply() -> None:
        kernels.apply([param], verdict, [0], [0], [-1e-6, 1e-6], [1 - 1e-6], "nearest", 0, 3, 0)

    target = torch.empty_like(grad)
    what: dict[str, tuple[Callable[[], object], float]] = {
        "copy": (lambda: target.copy_(grad), 8.0 * numel),
        "ballot": (lambda: ballot(momentum), 12.125 * numel),
        "ballot, bf16 momentum": (lambda: ballot(narrow), 8.125 * numel),
        "apply": (apply, 8.125 * numel),
    }
    for voters in VOTERS:
        shard = _words(device, voters, max(1, numel // voters))  # as many bytes as are copied, or starting would count
        seen = lambda ballots=shard: kernels.tally_majority(ballots, 0, 3, "rotate")  # noqa: E731
        what[f"tally of {voters}"] = (seen, 8.0 * shard[0].numel() * (voters + 1))
    seconds = medians({name: run for name, (run, _) in what.items()}, device, rounds)
    rate = {name: nbytes / seconds[name] / 1e9 for name, (_, nbytes) in what.items()}
    for name in what:
        share = rate[name] / rate["copy"]
        target_share = f">= {COPY_SHARE:.2f} of copy" if name != "copy" else ""
        held = share >= COPY_SHARE if name != "copy" else None
        yield Row("kernels", f"{name} ({share:.2f} of copy)", rate[name], "GB/s", target_share, held)


def counted(numel: int) -> str:
    """A number of parameters as people say it."""
    for name, unit in (("billion", 10**9), ("million", 10**6)):
        if numel >= unit:
            return f"{numel / unit:g} {name}"
    return f"{numel:,}"


def steps(kernels: ModuleType, device: torch.device, numel: int, rounds: int) -> Iterator[Row]:
    """A step of one worker, and its two kernels alone, beside torch's fused AdamW on as many float32 parameters."""
    try:
        found = _steps(kernels, device, [min(TENSOR, numel)] * max(1, numel // TENSOR), rounds)
    except torch.OutOfMemoryError:
        yield Row("steps", f"{counted(numel)} parameters do not fit", None, "")
        return
    finally:
        gc.collect()
    ratio = found["ballot + apply"] / found["fused AdamW"]
    at = f"{counted(numel)} parameters"
    yield Row("steps", f"fused AdamW, {at}", 1e3 * found["fused AdamW"], "ms")
    yield Row("steps", f"step(), {at}", 1e3 * found["step()"], "ms")
    target = f"<= {ADAMW_SHARE:.2f}" if numel == 10**9 else ""
    held = ratio <= ADAMW_SHARE if target else None
    yield Row("steps", f"ballot + apply over fused AdamW, {at}", ratio, "", target, held)


def small_tensors(kernels: ModuleType, device: torch.device, rounds: int) -> Iterator[Row]:
    """A thousand tensors of a thousand elements: what starting costs."""
    found = _steps(kernels, device, [1000] * 1000, rounds)
    for name in ("fused AdamW", "step()"):
        yield Row("small", f"{name}, 1,000 tensors of 1,000", 1e3 * found[name], "ms")


def _steps(kernels: ModuleType, device: torch.device, sizes: list[int], rounds: int) -> dict[str, float]:
    params = [nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    lion = dlion.DistributedLion(params, lr=1e-6)
    lion.step()
    found = medians({"step()": lion.step, "ballot + apply": _kernels_alone(kernels, lion, params)}, device, rounds)
    del lion
    adamw = torch.optim.AdamW(params, lr=1e-6, fused=True)
    return found | medians({"fused AdamW": adamw.step}, device, rounds)


def _kernels_alone(kernels: ModuleType, lion: dlion.DistributedLion, params: list[nn.Parameter]) -> Callable[[], None]:
    """Ballot and apply of all tensors, in buckets as a step takes them."""
    most = max(1, BUCKET // max(param.numel() for param in params))  # tensors of a bucket; all are of one size
    buckets = [params[first : first + most] for first in range(0, len(params), most)]

    def run() -> None:
        for held in buckets:
            offsets, size = placed([param.numel() for param in held])
            groups, momenta = [0] * len(held), [lion.state[param]["exp_avg"] for param in held]
            rest = (offsets, groups, size, [0.9], [0.99], [False], 0, 3, 0, "balanced")
            words, _ = kernels.ballot([param.grad for param in held], momenta, *rest)
            values = [param.detach() for param in held]
            kernels.apply(values, words, offsets, groups, [-1e-6, 1e-6], [1.0], "nearest", 0, 3, 0)

    return run


def _words(device: torch.device, *shape: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, device=device)


def between_devices(device: torch.device, workers: int, width: int, rounds: int) -> Iterator[Row]:
    """A step of DDP with fused AdamW and one of votes, of `workers` processes with a device each."""
    if workers < 2:
        return
    found = _of_all(workers, device.type, width, rounds)
    at = f"{workers} devices, {counted(found[0]['numel'])} parameters"
    for name in ("DDP and fused AdamW", "votes", "votes, overlap"):
        yield Row("devices", f"{name}, {at}", 1e3 * statistics.median(each[name] for each in found), "ms")
    yield Row("devices", f"bits sent per parameter, {at}", found[0]["bits"], "bits")
    equal = all(each["equal"] for each in found)
    yield Row("devices", f"replicas are equal afterwards, {at}", float(equal), "", "1", equal)


def _of_all(workers: int, kind: str, width: int, rounds: int) -> list[Any]:
    """What each of these processes found.

    Raises:
        ChildProcessError: one of them died; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        shape = (workers, kind, width, rounds, folder, results)
        ranks = [context.Process(target=_worker, args=(rank, *shape), daemon=True) for rank in range(workers)]
        for process in ranks:
            process.start()
        found: list[Any] = []
        try:
            while len(found) < workers:
                with suppress(queue.Empty):
                    found.append(results.get(timeout=1))
                for rank, process in enumerate(ranks):
                    if process.exitcode:
                        raise ChildProcessError(f"the process of device {rank} ended with status {process.exitcode}")
            for process in ranks:
                process.join(60)
        finally:
            for process in ranks:
                process.kill()
    return found


def _are_equal(lion: dlion.DistributedLion) -> bool:
    try:
        lion.verify_replicas()
    except AgreementError:
        return False
    return True


def _worker(rank: int, workers: int, kind: str, width: int, rounds: int, folder: str, results: Any) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=Path(folder, "store").as_uri(), rank=rank, world_size=workers)
    rows = torch.randn(32, width, device=device)
    models = [nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device) for _ in range(3)]
    averaged = DistributedDataParallel(models[0])
    local, early = map(dlion.local_gradients, models[1:])
    adamw = torch.optim.AdamW(averaged.parameters(), lr=1e-6, fused=True)
    lion = dlion.DistributedLion(local.named_parameters(), lr=1e-6)
    overlapped = dlion.DistributedLion(early.named_parameters(), lr=1e-6, overlap=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    trained = {
        "DDP and fused AdamW": lambda: step(averaged, adamw),
        "votes": lambda: step(local, lion),
        "votes, overlap": lambda: step(early, overlapped),
    }
    found = medians(trained, device, rounds)
    numel = sum(param.numel() for param in local.parameters())
    equal = all([_are_equal(optimizer) for optimizer in (lion, overlapped)])
    told = {"numel": numel, "bits": lion.stats.bits_per_param_sent, "equal": equal}
    results.put(found | told)
    dist.barrier()
    dist.destroy_process_group()
