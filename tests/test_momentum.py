"""Momentum in bfloat16: right on average, on every worker its own, and kept through saving and loading."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed, DistributedLion
from dlion.ops import KERNELS, library, reference
from dlion.train.tasks import load_task

AVAILABLE = [name for name in KERNELS if name != "triton" and (name != "native" or library.available())]  # on a CPU
NARROW = torch.bfloat16
ELEMENTS = 4000
RESOLUTION = 2.0**-8  # of bfloat16 just below 1


def momentum_of(opt: torch.optim.Optimizer, param: Tensor) -> Tensor:
    momentum: Tensor = opt.state[param]["exp_avg"]
    return momentum


def settled(steps: int, gradient: float, **options: Any) -> Tensor:
    """The momentum of many elements after so many steps with the same gradient."""
    param = nn.Parameter(torch.zeros(ELEMENTS))
    opt = DistributedLion([param], lr=1e-6, momentum_dtype=NARROW, **options)
    param.grad = torch.full_like(param, gradient)
    for _ in range(steps):
        opt.step()
    return momentum_of(opt, param).double()


@pytest.mark.wide(5)
@pytest.mark.parametrize("kernels", AVAILABLE)
@pytest.mark.parametrize(("gradient", "beta2"), [(1.0, 0.99), (-0.7, 0.99), (1.3e-5, 0.98), (1.0, 0.9)])
def test_a_constant_gradient_is_what_momentum_settles_at(gradient: float, beta2: float, kernels: str) -> None:
    seen = settled(round(12 / (1 - beta2)), gradient, betas=(0.9, beta2), kernels=kernels) / gradient
    # every step adds at most one resolution of noise, uniform or better, and forgets 1 - beta2**2 of its square
    deviation = RESOLUTION / (1 - beta2**2) ** 0.5
    assert abs(float(seen.mean()) - 1) < 6e-6 + 4 * deviation / ELEMENTS**0.5
    assert float(seen.std()) < deviation


def test_rounding_to_nearest_would_stay_short_of_it() -> None:
    """What the rounding is for."""
    momentum = torch.zeros(1, dtype=NARROW)
    for _ in range(1200):
        momentum = (momentum.float() * 0.99 + 1.0 * (1 - 0.99)).to(NARROW)
    assert 0.78 < float(momentum) < 0.82


def test_what_is_drawn_differs_between_ranks_and_from_what_parameters_are_rounded_by() -> None:
    halfway = torch.full((64 * 500,), 1 + 2.0**-8)  # between two bfloat16 numbers
    keys = [~0, ~1, reference.MOMENTUM_KEYS, reference.MOMENTUM_KEYS + 1]
    drawn = [reference.round_stochastic(halfway, NARROW, 3, 4, key) > 1 for key in keys]
    for k, mine in enumerate(drawn):
        assert abs(float(mine.double().mean()) - 0.5) < 0.02
        for other in drawn[:k]:
            assert abs(float((mine == other).double().mean()) - 0.5) < 0.02
    complement = reference.round_stochastic(halfway, NARROW, 3, 5, keys[2]) > 1
    assert float((complement == drawn[2]).double().mean()) < 0.01


@pytest.mark.wide(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg", "g-lion"])
def test_replicas_stay_equal_and_no_kernel_or_bucket_changes_a_bit(method: str, dtype: torch.dtype) -> None:
    def work(rank: int, group: Any, kernels: str, bucket_bytes: int) -> tuple[list[Tensor], list[Tensor]]:
        params = [nn.Parameter(torch.linspace(-2, 2, n).to(dtype).view(n // 10, 10).t()) for n in (130, 700)]
        opt = Distributed(
            params, method, 1e-2, process_group=group, kernels=kernels, momentum_dtype=NARROW, bucket_bytes=bucket_bytes
        )
        generator = torch.Generator().manual_seed(rank)
        for _ in range(12):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            opt.step()
        return [param.detach() for param in params], [momentum_of(opt, param) for param in params]

    def run(kernels: str, bucket_bytes: int) -> list[Any]:
        return succeed(world(3, lambda r, g: work(r, g, kernels, bucket_bytes)))

    first = run("auto", 2**20)
    replicas, momenta = zip(*first, strict=True)
    assert all(torch.equal(a, b) for other in replicas[1:] for a, b in zip(other, replicas[0], strict=True))
    assert all(m.dtype == NARROW and m.isfinite().all() for each in momenta for m in each)
    shared = all(torch.equal(a, b) for other in momenta[1:] for a, b in zip(other, momenta[0], strict=True))
    assert shared == (method == "g-lion")
    small = () if method == "g-lion" else (("auto", 64),)  # a vote's bits do not depend on buckets
    for kernels, bucket_bytes in (*((kernels, 2**20) for kernels in AVAILABLE), *small):
        for mine, theirs in zip(first, run(kernels, bucket_bytes), strict=True):
            assert all(torch.equal(a, b) for a, b in zip([*mine[0], *mine[1]], [*theirs[0], *theirs[1]], strict=True))


def test_training_learns_as_much_as_with_wide_momentum() -> None:
    task = load_task("fashion-mnist")
    losses = {}
    for dtype in (None, NARROW):
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        nn.init.zeros_(model[1].weight), nn.init.zeros_(model[1].bias)
        opt = DistributedLion(model.parameters(), lr=3e-4, momentum_dtype=dtype)
        for step in range(150):
            opt.zero_grad()
            loss = task.loss(model, *task.batch(seed=0, rank=0, workers=1, step=step, size=64))
            loss.backward()
            opt.step()
        total, _, count = task.evaluate(model, rank=0, workers=1, device=torch.device("cpu")).tolist()
        losses[dtype] = total / count
    assert losses[None] < 0.8  # 2.3 before
    assert abs(losses[NARROW] - losses[None]) < 0.02


@pytest.mark.parametrize("method", ["dlion-mavo", "g-lion"])
def test_a_loaded_state_goes_on_to_the_bit(method: str) -> None:
    def optimizer(params: Any) -> Distributed:
        return Distributed(params, method, lr=0.01, momentum_dtype=NARROW)

    def train(opt: Distributed, steps: range) -> None:
        for step in steps:
            for param in opt.param_groups[0]["params"]:
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).to(param.dtype)
            opt.step()

    model = nn.Linear(70, 3)
    opt = optimizer(model.parameters())
    train(opt, range(4))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    train(opt, range(4, 9))
    again = optimizer(other.parameters())
    again.load_state_dict(torch.load(file, weights_only=True))
    train(again, range(4, 9))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(momentum_of(opt, a), momentum_of(again, b))
        assert momentum_of(again, b).dtype == NARROW


@pytest.mark.parametrize(("saved", "loaded"), [(None, NARROW), (NARROW, None)])
def test_momentum_takes_the_dtype_of_the_optimizer_that_loads_it(saved: Any, loaded: Any) -> None:
    params = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5, dtype=torch.float64))]
    first = DistributedLion(params, momentum_dtype=saved)
    for param in params:
        param.grad = torch.full_like(param, 0.3)
    first.step()
    second = DistributedLion(params, momentum_dtype=loaded)
    second.load_state_dict(first.state_dict())
    wanted = [torch.float32, torch.float64] if loaded is None else [NARROW, NARROW]
    assert [momentum_of(second, param).dtype for param in params] == wanted
    second.step()
    assert [momentum_of(second, param).dtype for param in params] == wanted


def test_momenta_of_two_dtypes_are_a_difference_between_workers() -> None:
    def work(rank: int, group: Any) -> None:
        param = nn.Parameter(torch.ones(9))
        param.grad = torch.ones(9)
        DistributedLion([param], process_group=group, momentum_dtype=NARROW if rank else None).step()

    for error in world(2, work):
        assert "on rank 1 momentum_dtype='bfloat16' instead of 'None'" in str(error)


@pytest.mark.parametrize("given", [torch.float32, torch.float16, "bfloat16"])
def test_another_dtype_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"momentum_dtype=.*must be torch.bfloat16, or None for float32"):
        DistributedLion([nn.Parameter(torch.ones(1))], momentum_dtype=given)
    with pytest.raises(ValueError, match="has no meaning with method='g-adamw'"):
        Distributed([nn.Parameter(torch.ones(1))], "g-adamw", momentum_dtype=NARROW)
