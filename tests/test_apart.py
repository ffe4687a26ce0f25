"""A warning where gradients stay local and the optimizer that steps does not vote."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import succeed, world

from dlion import Distributed, DistributedLion, apart, local_gradients

Make = Callable[[nn.Module, dist.ProcessGroup], torch.optim.Optimizer]


def trained(make: Make, wrap: Callable[[nn.Module, dist.ProcessGroup], nn.Module], workers: int = 2) -> list[str]:
    """What all workers together are warned of in three steps."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = wrap(nn.Linear(3, 2), group)
        optimizer = make(model, group)
        for step in range(3):
            rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * rank + step))
            model(rows).square().mean().backward()
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        succeed(world(workers, work))
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def bare(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return local_gradients(model, group)


def ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return local_gradients(DistributedDataParallel(model, process_group=group))


@pytest.mark.parametrize("wrap", [bare, ddp])
def test_an_optimizer_that_does_not_vote_is_named_once_on_each_worker(wrap: Callable[..., nn.Module]) -> None:
    said = trained(lambda model, group: torch.optim.AdamW(model.parameters(), lr=0.01), wrap)
    assert len(said) == 2 and all(
        text.startswith("AdamW.step() moves parameters whose gradients stay") for text in said
    )


@pytest.mark.parametrize("method", ["dlion-mavo", "g-adamw", "d-signum-mavo", "powersgd", "terngrad"])
def test_every_method_votes(method: str) -> None:
    def make(model: nn.Module, group: dist.ProcessGroup) -> torch.optim.Optimizer:
        return Distributed(model.parameters(), method, lr=0.01, process_group=group)

    assert trained(make, bare) == []


def test_parameters_of_its_own_are_left_alone() -> None:
    def make(model: nn.Module, group: dist.ProcessGroup) -> torch.optim.Optimizer:
        head = nn.Linear(2, 2)
        torch.optim.SGD(head.parameters(), lr=0.1).step()
        return DistributedLion(model.parameters(), lr=0.01, process_group=group)

    assert trained(make, bare) == []
    adamw: Make = lambda model, group: torch.optim.AdamW(model.parameters(), lr=0.01)  # noqa: E731
    assert trained(adamw, lambda model, group: model) == []
    assert trained(adamw, bare, workers=1) == []  # alone, nothing can drift apart


def test_who_steps_around_a_voting_optimizer_or_not_at_all_is_left_alone() -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__(inner.param_groups[0]["params"], {"lr": 0.5})

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.inner.step()

    def make(model: nn.Module, group: dist.ProcessGroup) -> torch.optim.Optimizer:
        return Lookahead(DistributedLion(model.parameters(), lr=0.01, process_group=group))

    assert trained(make, bare) == []
    assert trained(lambda model, group: torch.optim.SGD(model.parameters(), lr=0.0), bare) == []


def test_votes_among_others_than_those_that_begin_equal_are_named() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = local_gradients(nn.Linear(3, 2), group)
        apart.watch(model.parameters(), [0, 1, 2, 3])  # as where a default group has more ranks
        optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)
        for step in range(2):
            model(torch.full((1, 3), float(rank + step))).sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="ranks 0, 1 vote together and local_gradients was called for ranks 0, 1, 2"):
        succeed(world(2, work))
