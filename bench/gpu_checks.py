"""What must be right on a device before its speed means anything: the same bits as the reference on the CPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import ModuleType

import torch
from torch import Tensor, nn

from dlion import DistributedLion
from dlion.ops import reference
from dlion.ops.bits import as_bytes

SHAPES = ((), (1,), (63,), (64,), (65,), (0,), (3, 5, 7), (1000,), (4097,))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MOMENTA = (torch.float32, torch.bfloat16)
STEPS = 100


@dataclass(frozen=True)
class Row:
    """One line of the table. `held`: whether it is as it must be; None where there is nothing to hold it to."""

    part: str
    what: str
    figure: float | None
    unit: str
    target: str = ""
    held: bool | None = None


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, odd: bool = True) -> Tensor:
    """Random numbers; `odd`: zeros, denormals and what is not finite among them."""
    flat = torch.randn(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(seed))
    if odd:
        for first, value in enumerate((0.0, float("inf"), float("nan"), 1e-40, -0.0)):
            flat[first::37] = value
    return flat.to(dtype).view(shape)


def moved(tensor: Tensor, device: torch.device, aligned: bool) -> Tensor:
    """A copy on the device: where vectors of numbers are aligned, or in memory that begins one element late."""
    if aligned:
        return tensor.to(device, copy=True)
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)[1:].view(tensor.shape).copy_(tensor)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are; which NaN stands where one does is no matter."""
    found, wanted = a.detach().cpu(), b.detach().cpu()
    if found.is_floating_point():
        if not torch.equal(found.isnan(), wanted.isnan()):
            return False
        found, wanted = (tensor.masked_fill(tensor.isnan(), 0) for tensor in (found, wanted))
    return torch.equal(as_bytes(found), as_bytes(wanted))


def correctness(kernels: ModuleType, device: torch.device) -> Iterator[Row]:
    """Every kernel against the reference, over dtypes and options."""
    cases = list(product(FLOATS, MOMENTA, ("balanced", "exact"), (4, 5), (True, False)))
    wrong = sum(not _same_ballot(kernels, device, *case) for case in cases)
    yield _count("ballots", wrong, len(cases))
    applied = list(product(FLOATS, (1, 2, 4), ("nearest", "stochastic"), (4, 5), (True, False)))
    wrong = sum(not _same_apply(kernels, device, *case) for case in applied)
    yield _count("verdicts applied", wrong, len(applied))
    voters = (*range(1, 10), 64, 511, 512)
    counted = list(product(voters, (4, 5), (1024, 1027)))  # words: those of one program lie in vectors, or do not
    wrong = sum(not _same_tally(kernels, device, *case) for case in counted)
    yield _count("tallies", wrong, len(counted))
    held = [
        moved(numbers(shape, dtype, 70), device, aligned)
        for shape, dtype, aligned in product((*SHAPES, (1 << 20,)), FLOATS, (True, False))
    ]
    wrong = sum(not same(kernels.hashed(each, k), reference.hashed(each.cpu(), k)) for k, each in enumerate(held))
    yield _count("checksums", wrong, len(held))


def determinism(kernels: ModuleType, device: torch.device) -> Iterator[Row]:
    """The same input ten times, on two queues at once where the device has such."""
    grads = [numbers((1 << 20,), torch.float32, 1).to(device)]
    first: tuple[Tensor, Tensor] | None = None
    differing = 0
    for number in range(10):
        momenta = [numbers((1 << 20,), torch.bfloat16, 2).to(device)]
        with _another_queue(device, number % 2):
            words, _ = _ballot(kernels, grads, momenta, "balanced", 5)
            found = words.cpu(), momenta[0].cpu()
        first = first or found
        differing += not all(map(same, found, first))
    yield _count("repetitions", differing, 10)


def replicas(device: torch.device) -> Iterator[Row]:
    """One model trained on the CPU and on the device by the same gradients, with votes of one worker."""
    for dtype, overlap in (*((dtype, False) for dtype in FLOATS), (torch.float32, True)):
        here, there = _model(dtype), _model(dtype).to(device)
        how = {"lr": 1e-2, "weight_decay": 0.1, "overlap": overlap}
        optimizers = [DistributedLion(model.named_parameters(), **how) for model in (here, there)]
        for step in range(STEPS):
            for number, (a, b) in enumerate(zip(here.parameters(), there.parameters(), strict=True)):
                # what is not finite keeps a worker from voting: in a few steps alone
                grad = numbers(tuple(a.shape), dtype, 1000 * step + number, odd=step % 10 == 9)
                for param in (a, b):
                    param.grad = None
                    torch.autograd.backward([param], [grad.to(param.device)])  # as any backward: it calls hooks
            for optimizer in optimizers:
                optimizer.step()
        steps = {int(optimizer.param_groups[0]["t"]) for optimizer in optimizers}
        equal = steps == {STEPS * 9 // 10} and all(map(same, here.parameters(), there.parameters()))
        name = str(dtype).removeprefix("torch.") + ", overlap" * overlap
        yield Row("replicas", f"CPU and device differ after {STEPS} steps, {name}", float(not equal), "", "0", equal)


def capture(device: torch.device) -> Iterator[Row]:
    """A step in a CUDA graph, alone and with backward before it or around it, against steps that are called."""
    if device.type != "cuda":
        return
    for what, backward, overlap in (
        ("steps", False, False),
        ("backward and steps", True, False),
        ("steps with overlap", True, True),
    ):
        try:
            equal = _replayed_as_called(device, backward, overlap)
        except RuntimeError as error:
            yield Row("graph", f"{what} can be captured ({str(error).splitlines()[0][:80]})", 0.0, "", "1", False)
        else:
            yield Row("graph", f"replayed {what} are those called", float(equal), "", "1", equal)


def _replayed_as_called(device: torch.device, backward: bool, overlap: bool) -> bool:
    inputs = numbers((8, 37), torch.float32, 7, odd=False).to(device)
    models = [_model(torch.float32).to(device) for _ in range(2)]
    optimizers = [DistributedLion(model.named_parameters(), lr=1e-2, overlap=overlap) for model in models]

    def step(number: int) -> None:
        if backward:
            optimizers[number].zero_grad()
            models[number](inputs).square().mean().backward()
        optimizers[number].step()

    queue = torch.cuda.Stream(device)
    queue.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(queue):  # a graph takes no step before which state is made
        for number, model in enumerate(models):
            for param in model.parameters():
                param.grad = numbers(tuple(param.shape), torch.float32, 7, odd=False).to(device)
            step(number)
            step(number)
    torch.cuda.current_stream(device).wait_stream(queue)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(1)
    for _ in range(3):
        step(0)
        graph.replay()
    torch.cuda.synchronize()
    optimizers[1].check()
    return all(map(same, models[0].parameters(), models[1].parameters()))


def memory(device: torch.device, numel: int) -> Iterator[Row]:
    """What a step takes beside parameters, gradients and momenta."""
    if device.type != "cuda":
        return
    for dtype in MOMENTA:
        params = [nn.Parameter(torch.zeros(numel, device=device))]
        params[0].grad = torch.ones_like(params[0])
        narrow = dtype if dtype == torch.bfloat16 else None
        optimizer = DistributedLion(params, lr=1e-6, momentum_dtype=narrow)
        optimizer.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        extra = 8 * (torch.cuda.max_memory_allocated() - before) / numel
        state = optimizer.state[params[0]]["exp_avg"].element_size()
        what = f"extra bits per parameter of a step alone, momentum of {state} bytes"
        yield Row("memory", what, extra, "bits", "<= 4", extra <= 4)
        del params, optimizer


def _count(what: str, wrong: int, of: int) -> Row:
    return Row("bits", f"{what} that differ, of {of}", float(wrong), "", "0", wrong == 0)


def _another_queue(device: torch.device, number: int) -> "torch.cuda.StreamContext | torch.no_grad":
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" and number else torch.no_grad()


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 129), nn.Linear(129, 65), nn.LayerNorm(65)).to(dtype)


def placed(numels: list[int]) -> tuple[list[int], int]:
    """Where tensors of so many elements lie in a bucket, and its size."""
    offsets, first = [], 0
    for numel in numels:
        offsets.append(first)
        first += -(-numel // 64) * 64
    return offsets, first


def _ballot(
    kernels: ModuleType, grads: list[Tensor], momenta: list[Tensor], zeros: str, t: int
) -> tuple[Tensor, Tensor]:
    offsets, size = placed([momentum.numel() for momentum in momenta])
    groups = [k % 2 for k in range(len(momenta))]
    words, finite = kernels.ballot(
        grads, momenta, offsets, groups, size, [0.9, 0.95], [0.99, 0.98], [False, True], 3, t, 1, zeros
    )
    return words, finite


def _same_ballot(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, kept: torch.dtype, zeros: str, t: int, aligned: bool
) -> bool:
    grads = [numbers(shape, dtype, 10 + k) for k, shape in enumerate(SHAPES)]
    momenta = [numbers(shape, kept, 50 + k, odd=False) for k, shape in enumerate(SHAPES)]
    there = [[moved(tensor, device, aligned) for tensor in tensors] for tensors in (grads, momenta)]
    words, finite = _ballot(kernels, there[0], there[1], zeros, t)
    wanted, fine = _ballot(reference, grads, momenta, zeros, t)
    return same(words, wanted) and bool(finite) == bool(fine) and all(map(same, there[1], momenta))


def _same_apply(
    kernels: ModuleType, device: torch.device, dtype: torch.dtype, planes: int, rounding: str, t: int, aligned: bool
) -> bool:
    params = [numbers(shape, dtype, 90 + k) for k, shape in enumerate(SHAPES)]
    there = [moved(param, device, aligned) for param in params]
    offsets, size = placed([param.numel() for param in params])
    generator = torch.Generator().manual_seed(planes)
    verdict = torch.randint(-(2**63), 2**63 - 1, (planes, size // 64), generator=generator)
    tables = [0.01 * (k - 1) for k in range(2 * 2**planes)]
    rest = (offsets, [k % 2 for k in range(len(SHAPES))], tables, [0.999, 1.0], rounding, 3, t, 7)
    kernels.apply(there, verdict.to(device), *rest)
    reference.apply(params, verdict, *rest)
    return all(map(same, there, params))


def _same_tally(kernels: ModuleType, device: torch.device, voters: int, t: int, words: int) -> bool:
    generator = torch.Generator().manual_seed(voters)
    ballots = torch.randint(-(2**63), 2**63 - 1, (voters, 2, words), generator=generator)
    ballots[:, 1] &= ballots[:, 0]  # what is zero is not positive
    bits, there = ballots[:, 1].contiguous(), ballots.to(device)
    more = (bits.to(device), there)
    found, wanted = (
        [
            *(k.tally_majority(one, 3, t, ties) for ties in ("rotate", "alternate")),
            *(k.tally_majority_ternary(two, 3, t, ties) for ties in ("rotate", "alternate", "zero")),
            k.tally_count(one, voters.bit_length()),
            k.tally_count_ternary(two, (2 * voters).bit_length()),
        ]
        for k, (one, two) in ((kernels, more), (reference, (bits, ballots)))
    )
    return all(map(same, found, wanted))
