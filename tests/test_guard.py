"""Warnings of gradients that were averaged before dlion sees them, in whole or in part, or that never come."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import succeed, world

from dlion import DistributedLion, local_gradients

INPUTS = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(3))
MODEL = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def ddp(group: dist.ProcessGroup, model: nn.Module = MODEL, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(copy.deepcopy(model), process_group=group, **options)


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    model.zero_grad()
    model(INPUTS[rank] + step).square().mean().backward()


def guarded(wrap: Callable[[dist.ProcessGroup], nn.Module], steps: int, zero: bool = False) -> list[list[str]]:
    """What each of two workers is warned of."""
    with warnings.catch_warnings(record=True) as caught:  # of all threads: the filters are the process's
        warnings.simplefilter("always")

        def work(rank: int, group: dist.ProcessGroup) -> None:
            model = wrap(group)
            optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)
            for step in range(steps):
                backward(model, rank, step)
                if zero:
                    optimizer.zero_grad(set_to_none=False)
                optimizer.step()

        succeed(world(2, work))
    said = [w for w in caught if "local_gradients" in str(w.message)]
    assert all(w.filename == __file__ for w in said)  # where step() is called, for users to find
    return [str(w.message) for w in said]


def test_averaged_gradients_are_found_out_after_three_steps() -> None:
    assert guarded(ddp, steps=2) == []
    said = guarded(ddp, steps=6)
    assert len(said) == 2 and "averaged already" in said[0]


def test_a_part_whose_gradients_are_averaged_is_found_out_and_named() -> None:
    def in_part(group: dist.ProcessGroup) -> nn.Module:
        model = copy.deepcopy(MODEL)
        layers = list(model.children())
        return nn.Sequential(ddp(group, layers[0]), *layers[1:])

    assert guarded(in_part, steps=2) == []
    said = guarded(in_part, steps=4)
    assert len(said) == 2 and "gradients of some parameters were equal on all 2 workers (parameter 0 of" in said[0]
    assert guarded(lambda group: local_gradients(in_part(group), group), steps=4) == []


def test_a_gradient_that_is_equal_by_itself_is_left_alone() -> None:
    """The loss is linear in the bias, so that its gradient is the same whatever the data are."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        def work(rank: int, group: dist.ProcessGroup) -> None:
            model = nn.Linear(3, 2)
            optimizer = DistributedLion(model.parameters(), lr=0.0, process_group=group)
            local_gradients(model, group)
            for step in range(4):
                optimizer.zero_grad()
                model(torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step))).sum().backward()
                optimizer.step()

        succeed(world(2, work))


@pytest.mark.parametrize("workers", [1, 2])
def test_steps_without_any_gradient_are_found_out(workers: int) -> None:
    """One that comes in time, on any worker, is enough."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        for late in (3, 2):
            model = copy.deepcopy(MODEL)
            optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)
            for step in range(5):
                if step >= late and rank == 0:
                    backward(model, rank, step)
                optimizer.step()

    with pytest.warns(UserWarning, match="no parameter of the optimizer had a gradient on any worker") as caught:
        succeed(world(workers, work))
    assert len(caught) == workers and {each.filename for each in caught} == {__file__}


def test_local_and_zero_gradients_are_left_alone() -> None:
    assert guarded(lambda group: local_gradients(ddp(group)), steps=4) == []
    assert guarded(lambda group: copy.deepcopy(MODEL), steps=4) == []
    assert guarded(ddp, steps=4, zero=True) == []


@pytest.mark.parametrize(("begins", "noticed"), [(60, True), (101, False)])
def test_averaging_that_begins_later_is_found_out_within_a_hundred_steps(begins: int, noticed: bool) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)
        for step in range(103):
            backward(model, rank, step % 4)  # larger inputs would end at the same bits of tanh on all workers
            if step >= begins:
                for param in model.parameters():
                    group.allreduce(param.grad).wait()
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # the last of a hundred and three has been looked at: nothing is compared in this one

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        succeed(world(2, work))
    assert ["averaged already" in str(each.message) for each in caught] == [True, True][: 2 * noticed]
