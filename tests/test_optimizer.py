"""DistributedLion as a torch.optim.Optimizer: construction, groups, closures, schedulers, hooks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from dlion import Distributed, DistributedLion


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def fill_gradients(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for seed in range(first, first + steps):
        fill_gradients(optimizer, seed)
        optimizer.step()


def test_it_is_a_torch_optimizer_and_says_what_it_holds() -> None:
    optimizer = DistributedLion([parameter(1.0)], lr=0.25, weight_decay=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, Distributed)
    assert repr(optimizer).startswith("DistributedLion (\nParameter Group 0")
    for part in ("lr: 0.25", "betas: (0.9, 0.99)", "weight_decay: 0.5", "maximize: False", "t: 0"):
        assert part in repr(optimizer)
    assert repr(Distributed([parameter(1.0)])).startswith("Distributed (")


# ---- groups


def test_every_group_has_its_own_hyper_parameters() -> None:
    choices = [
        {"lr": 0.5, "weight_decay": 0.0, "betas": (0.9, 0.99)},
        {"lr": 0.25, "weight_decay": 0.1, "betas": (0.5, 0.75)},
        {"lr": 0.125, "maximize": True},
    ]
    values = [torch.randn(70, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    together = [nn.Parameter(v.clone()) for v in values]
    apart = [nn.Parameter(v.clone()) for v in values]
    one = DistributedLion([{"params": [p], **c} for p, c in zip(together, choices, strict=True)], lr=1.0)
    many = [DistributedLion([p], **c) for p, c in zip(apart, choices, strict=True)]
    for seed in range(5):
        fill_gradients(one, seed)
        for a, b in zip(together, apart, strict=True):
            b.grad = a.grad.clone()
        for optimizer in (one, *many):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


def test_weight_decay_is_decoupled_and_exact() -> None:
    p = parameter(8.0, -8.0, 8.0)
    optimizer = DistributedLion([p], lr=0.25, weight_decay=0.5)
    p.grad = torch.tensor([1.0, 1.0, 0.0])
    optimizer.step()
    assert p.tolist() == [8 * 0.875 - 0.25, -8 * 0.875 - 0.25, 8 * 0.875]  # p*(1 - lr*wd) - lr*u


def test_named_parameters_are_accepted_and_name_their_errors() -> None:
    model = nn.Linear(3, 2)
    optimizer = DistributedLion(model.named_parameters(), lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    train(optimizer, 2)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_a_group_added_in_training_starts_with_zero_momentum_and_the_common_t() -> None:
    first, second = parameter(1.0, 2.0), parameter(3.0, 4.0)
    optimizer = DistributedLion([first], lr=0.5)
    train(optimizer, 3)
    optimizer.add_param_group({"params": [second], "lr": 0.25})
    assert [group["t"] for group in optimizer.param_groups] == [3, 3]
    fill_gradients(optimizer, 9)
    before, grad = second.detach().clone(), second.grad.clone()
    optimizer.step()
    assert torch.equal(second, before - 0.25 * grad.sign())
    assert torch.equal(optimizer.state[second]["exp_avg"], grad * (1 - 0.99))
    assert [group["t"] for group in optimizer.param_groups] == [4, 4]


@pytest.mark.parametrize(
    "group",
    [
        {"params": [parameter(1.0)], "lr": -1.0},
        {"params": [parameter(1.0)], "betas": (2.0, 0.9)},
        {"params": [parameter(1.0)], "weight_decay": "a lot"},
        {"params": [parameter(1.0)], "betas": 0.5},
        {"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]},
    ],
)
def test_a_refused_group_leaves_no_trace(group: dict[str, Any]) -> None:
    optimizer = DistributedLion([parameter(1.0, 2.0)], lr=0.5)
    train(optimizer, 1)
    with pytest.raises(ValueError):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1 and len(optimizer.state) == 1
    train(optimizer, 1)
    assert optimizer.param_groups[0]["t"] == 2


def test_parameters_twice_and_no_parameters_are_refused() -> None:
    p = parameter(1.0)
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedLion([])
    with pytest.raises(ValueError, match="more than one parameter group"):
        DistributedLion([{"params": [p]}, {"params": [p]}])


def test_maximize_is_the_negated_gradient_to_the_bit() -> None:
    for method in ("dlion-mavo", "dlion-avg", "g-lion", "g-adamw"):
        value = torch.randn(200, generator=torch.Generator().manual_seed(1))
        up, down = nn.Parameter(value.clone()), nn.Parameter(value.clone())
        climbing = Distributed([up], method, lr=0.01, weight_decay=0.1, maximize=True)
        falling = Distributed([down], method, lr=0.01, weight_decay=0.1)
        for seed in range(4):
            fill_gradients(climbing, seed)
            down.grad = -up.grad
            climbing.step(), falling.step()
        assert torch.equal(up, down), method
        assert not torch.equal(up, value)


# ---- closures, schedulers, hooks


def test_a_closure_runs_once_with_gradients_on_and_before_they_are_read() -> None:
    p = parameter(3.0)
    optimizer = DistributedLion([p], lr=0.5)
    calls: list[bool] = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    p.grad = torch.tensor([-1.0])  # of the wrong sign: must not be the one that counts
    loss = optimizer.step(closure)
    assert calls == [True] and loss.item() == 9.0 and p.item() == 2.5
    with torch.no_grad():
        optimizer.step(closure)
    assert calls == [True, True] and p.item() == 2.0
    assert optimizer.step() is None


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.LambdaLR(o, lambda k: 0.5**k),
        lambda o: schedulers.MultiplicativeLR(o, lambda k: 0.5),
        lambda o: schedulers.StepLR(o, 2),
        lambda o: schedulers.MultiStepLR(o, [1, 3]),
        lambda o: schedulers.ConstantLR(o, 0.5, 2),
        lambda o: schedulers.LinearLR(o),
        lambda o: schedulers.ExponentialLR(o, 0.5),
        lambda o: schedulers.PolynomialLR(o, 4),
        lambda o: schedulers.CosineAnnealingLR(o, 4),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
        lambda o: schedulers.OneCycleLR(o, 0.1, 6, cycle_momentum=False),
        lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
        lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o), schedulers.ConstantLR(o)], [2]),
        lambda o: schedulers.ChainedScheduler([schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.5)]),
    ],
    ids="lambda multiplicative step multistep constant linear exponential polynomial cosine restarts cyclic onecycle "
    "plateau sequential chained".split(),
)
def test_each_step_moves_by_the_learning_rate_of_its_scheduler(make: Callable[[Any], Any], as_tensor: bool) -> None:
    p = parameter(0.0, dtype=torch.float64)
    lr = torch.tensor(0.1, dtype=torch.float64) if as_tensor else 0.1
    optimizer = DistributedLion([p], lr=lr)
    scheduler = make(optimizer)
    rates = []
    for _ in range(5):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        before = p.item()
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert p.item() == before - rates[-1]
        scheduler.step(1.0) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else scheduler.step()
    assert len(set(rates)) > 1
    assert not as_tensor or isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_zero_grad_clears_or_zeroes() -> None:
    optimizer = DistributedLion([parameter(1.0), parameter(2.0)])
    fill_gradients(optimizer, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in optimizer.param_groups[0]["params"])
    optimizer.zero_grad()
    assert all(p.grad is None for p in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("kind", [DistributedLion, Distributed])
def test_step_hooks_run_once_around_a_step_and_the_profiler_sees_it(kind: type[Distributed]) -> None:
    p = parameter(1.0)
    optimizer = kind([p], lr=0.5)
    seen: list[tuple[str, float]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", p.item())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", p.item())))
    p.grad = torch.ones(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert seen == [("before", 1.0), ("after", 0.5)]
    names = [event.key for event in profile.key_averages()]
    assert names.count(f"Optimizer.step#{kind.__name__}.step") == 1


def test_frozen_low_precision_parameters_have_no_state() -> None:
    frozen = parameter(1.0, dtype=torch.bfloat16).requires_grad_(False)
    optimizer = DistributedLion([frozen, parameter(1.0)], lr=0.5)
    train(optimizer, 1)
    assert frozen not in optimizer.state
