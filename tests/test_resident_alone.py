"""What one worker does alone, and what is unheard when something ends: all stay in step on the device, and go on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from resident_model import Model, on_device, optimizer_of
from torch import nn
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join
from uneven import ranks_of_threads
from world import gloo_group, succeed, world

from dlion import Distributed
from dlion.errors import AgreementError, DlionError, NonFiniteGradientError, OverlapError
from dlion.resident import choice

assert on_device

Change = Callable[[Model, Distributed, int, int], None]


def backward(model: Model, rank: int, step: int, scale: float = 1.0) -> None:
    """As any backward, it calls hooks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    for param in reversed([param for param in model.parameters() if param.requires_grad]):
        torch.autograd.backward([param], [torch.randn(param.shape, generator=generator) * scale])


def trained(rank: int, group: Any, change: Change, steps: int = 14, **options: Any) -> tuple[list[Any], Any, int, int]:
    """Kind and step of every error; parameters, t and steps counted in the end."""
    model = Model()
    optimizer = optimizer_of(model, group, **options)
    errors: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        try:
            backward(model, rank, step)
            change(model, optimizer, rank, step)
            optimizer.step()
        except DlionError as error:
            errors.append((type(error), step))
            for param in model.parameters():
                param.requires_grad_()
    optimizer.check()
    return errors, model.copies(), int(optimizer.param_groups[0]["t"]), optimizer.stats.steps


def same(found: list[Any]) -> bool:
    return all(all(map(torch.equal, each[1], found[0][1])) and each[2:] == found[0][2:] for each in found)


@pytest.mark.parametrize("step", [2, 9, 10])
def test_a_state_that_one_worker_loads_again(step: int) -> None:
    def load(model: Model, optimizer: Distributed, rank: int, now: int) -> None:
        if (rank, now) == (1, step):
            optimizer.load_state_dict(optimizer.state_dict())

    def work(rank: int, group: Any) -> Any:
        model = Model()
        optimizer = optimizer_of(model, group, overlap=True, verify_every=10)
        for now in range(14):
            optimizer.zero_grad()
            load(model, optimizer, rank, now)
            backward(model, rank, now)
            optimizer.step()
        optimizer.check()
        return [], model.copies(), int(optimizer.param_groups[0]["t"]), optimizer.stats.checks

    found = succeed(world(2, work))
    assert same(found) and found[0][2] == 14


def test_a_gradient_that_one_worker_changes_is_its_own_error() -> None:
    def scale(model: Model, optimizer: Distributed, rank: int, step: int) -> None:
        if (rank, step) == (1, 1):
            model.c.grad.mul_(2)

    found = succeed(world(3, lambda rank, group: trained(rank, group, scale, overlap=True, verify_every=1)))
    assert same(found) and found[0][2] == 14
    assert [each[0] for each in found] == [[], [(OverlapError, 2)], []]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_a_layout_that_one_worker_changes(overlap: bool, asks: bool) -> None:
    def work(rank: int, group: Any) -> Any:
        model = Model()
        optimizer = optimizer_of(model, group, overlap=overlap, verify_every=1)
        errors = []
        for step in range(8):
            optimizer.zero_grad()
            if (rank, step) == (1, 3):
                model.b.requires_grad_(False)
            backward(model, rank, step)
            try:
                optimizer.step()
                if asks:
                    optimizer.check()
            except AgreementError as error:
                errors.append((str(error), step))
                model.b.requires_grad_()
        optimizer.check()
        return errors, model.copies(), int(optimizer.param_groups[0]["t"]), optimizer.stats.steps

    found = succeed(world(3, work))
    assert same(found) and found[0][2] == (7 if asks else 6)
    ((said, step),) = found[0][0]
    assert all(each[0] == [(said, step)] for each in found) and step == (3 if asks else 4)
    assert "the layout changed on rank 1 alone after t=3 steps" in said and "b [5, 7] float32 is frozen" in said


@pytest.mark.parametrize("device", [False, True])
def test_an_error_under_a_scaler_leaves_no_scale_behind(device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "is_accelerator", lambda _: device)

    def work(rank: int, group: Any) -> list[float]:
        model, scaler = Model(), GradScaler("cpu", init_scale=2.0**10)
        optimizer = optimizer_of(model, group)
        sizes = []
        for step in range(7):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.5 if (rank, step) == (1, 2) else 0.01
            loss = sum(((param * (1.0 + rank)).sum() for param in model.parameters()), torch.zeros(()))
            scaler.scale(loss).backward()
            try:
                scaler.step(optimizer)
            except AgreementError:
                assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
            else:
                sizes.append(float(model.a.grad[0]))
            scaler.update()
        return sizes

    assert succeed(world(2, work)) == [[1.0] * 6, [2.0] * 6]


@pytest.mark.parametrize("device", [False, True])
def test_groups_are_added_with_overlap(device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "is_accelerator", lambda _: device)

    def add(model: Model, optimizer: Distributed, rank: int, step: int) -> None:
        if step == 3:
            model.d = nn.Parameter(torch.ones(70))
            optimizer.add_param_group({"params": [("d", model.d)], "lr": 0.1})

    found = succeed(world(2, lambda rank, group: trained(rank, group, add, overlap=True)))
    assert same(found) and found[0][0] == [] and found[0][2] == 14 and (found[0][1][-1] != 1).any()


def test_one_worker_alone_hears_of_a_step_before_its_layout_changes() -> None:
    model = Model()
    optimizer = optimizer_of(model, None, overlap=True, nonfinite="raise")
    for step in range(4):
        optimizer.zero_grad()
        if step == 3:
            model.b.requires_grad_(False)
        backward(model, 0, step, torch.nan if step == 2 else 1.0)
        if step < 3:
            optimizer.step()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()


def test_trouble_of_a_group_that_is_gone_is_told_once() -> None:
    def work(rank: int, group: Any) -> int:
        model = Model()
        optimizer = optimizer_of(model, group)
        for step in range(3):
            model.fill(rank, step)
            optimizer.param_groups[0]["lr"] = 0.5 if (rank, step) == (1, 2) else 0.01
            optimizer.step()
        optimizer.process_group = groups[rank]
        model.fill(rank, 3)
        with pytest.raises(AgreementError, match="step t=2 was not applied"):
            optimizer.step()
        for step in range(4, 6):
            model.fill(rank, step)
            optimizer.step()
        optimizer.check()
        return int(optimizer.param_groups[0]["t"])

    groups = [gloo_group(dist.HashStore(), f"alone {rank}", 0, 1, 30) for rank in range(2)]
    assert succeed(world(2, work)) == [4, 4]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_end_of_join_hears_of_the_last_step(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_of_threads(monkeypatch)

    def work(rank: int, group: Any, spoilt: bool) -> Any:
        model = Model()
        optimizer = optimizer_of(model, group, verify_every=1, nonfinite="raise", overlap=overlap)
        with Join([optimizer]):
            for step in range((2, 5, 5)[rank]):
                optimizer.zero_grad()
                backward(model, rank, step, torch.nan if spoilt and (rank, step) == (1, 4) else 1.0)
                optimizer.step()
        return optimizer.stats.checks

    assert succeed(world(3, lambda rank, group: work(rank, group, False))) == [5] * 3
    results = world(3, lambda rank, group: work(rank, group, True))
    assert all(isinstance(error, NonFiniteGradientError) for error in results)


def test_gradients_are_compared_while_they_are_there() -> None:
    """Warnings are errors: neither is nothing trained where gradients are cleared, nor is what overflowed averaged."""

    def work(rank: int, group: Any) -> None:
        model, scaler = Model(), GradScaler("cpu", init_scale=2.0**10)
        optimizer = optimizer_of(model, group)
        for step in range(6):
            model.fill(rank, step)
            if step < 3:
                for param in model.parameters():
                    param.grad.fill_(torch.nan)
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            optimizer.check()

    succeed(world(2, work))


def test_a_step_is_counted_once_though_replicas_differ() -> None:
    def flip(model: Model, optimizer: Distributed, rank: int, step: int) -> None:
        if (rank, step) == (1, 4):
            with torch.no_grad():
                model.a[0] += 1
        assert optimizer.stats.steps == step

    def work(rank: int, group: Any) -> Any:
        errors, _, t, steps = trained(rank, group, flip, overlap=True, verify_every=4, on_mismatch="repair")
        return errors, t, steps

    with pytest.warns(UserWarning, match="took the values"):
        found = succeed(world(3, work))
    assert found == [([], 14, 14)] * 3
