"""A checkpoint of other dtypes or groups is refused before anything changes; momenta alone are converted."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import fresh, simulate, train, trained, whole
from torch import nn
from world import succeed, world

from dlion import Distributed, Simulation, checkpoint
from dlion.errors import CheckpointError


def halved(model: nn.Module) -> None:
    model[2].weight.data = model[2].weight.data.bfloat16()


def frozen(model: nn.Module) -> None:
    model[2].bias = nn.Parameter(model[2].bias.data.double(), requires_grad=False)


def whole_numbers(model: nn.Module) -> None:
    model[1].running_mean = torch.zeros(70, dtype=torch.int64)


def fractions(model: nn.Module) -> None:
    model[1].num_batches_tracked = torch.tensor(0.0)


CHANGES: list[tuple[Callable[[nn.Module], None], str]] = [
    (halved, "the parameter 2.weight is bfloat16 and float32 in the checkpoint, and nothing is converted"),
    (frozen, "the parameter 2.bias is float64 and float32 in the checkpoint"),
    (whole_numbers, "the buffer 1.running_mean is int64 and float32 in the checkpoint"),
    (fractions, "the buffer 1.num_batches_tracked is float32 and int64 in the checkpoint"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two workers after two steps."""
    path = tmp_path_factory.mktemp("fit") / "a"

    def work(rank: int, group: dist.ProcessGroup) -> None:
        checkpoint.save(path, *trained(2, group, rank))

    succeed(world(2, work))
    return path


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_another_dtype_of_one_worker_is_every_workers_error_and_nothing_changes(
    change: Callable[[nn.Module], None], said: str, saved: Path
) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        model = fresh()
        if rank == 1:
            change(model)
        optimizer = Distributed(model.parameters(), lr=0.5, process_group=group)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(CheckpointError) as error:
            checkpoint.load(saved, model, optimizer)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5
        return str(error.value)

    for text in succeed(world(2, work)):
        assert f"rank 1: {said}" in text


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_simulated_workers_are_held_to_it_too(change: Callable[[nn.Module], None], said: str, saved: Path) -> None:
    model = fresh()
    change(model)
    simulation = Simulation(model, workers=2)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(saved, model, simulation)
    assert not simulation.state


@pytest.mark.parametrize("method", ["dlion-mavo", "g-lion"])
@pytest.mark.parametrize(("there", "here"), [(None, torch.bfloat16), (torch.bfloat16, None)])
def test_momenta_take_the_dtype_that_the_optimizer_was_made_with(
    there: torch.dtype | None, here: torch.dtype | None, method: str, tmp_path: Path
) -> None:
    """To the nearest where bits go, exactly where they come."""
    first = Simulation(fresh(), method, lr=0.01, workers=2, momentum_dtype=there)
    simulate(first, range(3))
    checkpoint.save(tmp_path / "a", first.model, first)
    second = Simulation(fresh(), method, workers=2, momentum_dtype=here)
    checkpoint.load(tmp_path / "a", second.model, second)
    for rank in range(2):
        given = first.state_dict(rank)["state"]
        for index, state in second.state_dict(rank)["state"].items():
            assert torch.equal(state["exp_avg"], given[index]["exp_avg"].to(here or torch.float32))
            assert state["exp_avg"].dtype == (here or torch.float32)
    simulate(second, range(3, 5))


def test_a_momentum_of_another_shape_is_found_before_anything_changes(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer found it, after the parameters had been written."""
    from dlion.checkpoint.stacked import Stacked

    rows = Stacked.rows

    def cut(self: Stacked, *asked: Any) -> dict[str, torch.Tensor]:
        return {key: row[:1] if key == "own/exp_avg/2.bias" else row for key, row in rows(self, *asked).items()}

    monkeypatch.setattr(Stacked, "rows", cut)
    model, optimizer = trained(1)
    before = whole(model, optimizer)
    with pytest.raises(CheckpointError, match=r"the exp_avg of 2.bias is float32 of shape \[1\] in the checkpoint"):
        checkpoint.load(saved, model, optimizer)
    assert all(
        torch.equal(value, before["tensors"][name]) for name, value in whole(model, optimizer)["tensors"].items()
    )


def groups_of(model: nn.Module, parts: list[list[str]]) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [{"params": [(name, named[name]) for name in names]} for names in parts]


WEIGHTS, BIASES = ["0.weight", "1.weight", "2.weight"], ["0.bias", "1.bias", "2.bias"]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            [BIASES, WEIGHTS],
            "the optimizer has 2 parameter groups and 2 were saved: 0.bias is in group 0 here and in group 1 there, "
            "1.bias is in group 0 here and in group 1 there, 2.bias is in group 0 here and in group 1 there, and so on "
            "for 3 more parameters: make the groups in the saved order",
        ),
        (
            [[*WEIGHTS, "2.bias"], BIASES[:2]],
            "2.bias is in group 0 here and in group 1 there: make the groups as they were saved",
        ),
        ([WEIGHTS, BIASES[:2]], "2.bias is in none here and in group 1 there"),
        ([WEIGHTS, BIASES[:2], BIASES[2:]], "3 parameter groups and 2 were saved: 2.bias is in group 2 here and in"),
    ],
)
def test_other_groups_are_said_parameter_by_parameter(parts: list[list[str]], said: str, tmp_path: Path) -> None:
    model = fresh()
    checkpoint.save(tmp_path / "a", model, Distributed(groups_of(model, [WEIGHTS, BIASES])))
    other = fresh()
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(tmp_path / "a", other, Distributed(groups_of(other, parts)))
    assert said in str(error.value)
    turned = fresh()  # within a group the order does not matter
    checkpoint.load(tmp_path / "a", turned, Distributed(groups_of(turned, [WEIGHTS[::-1], BIASES])))


def test_what_the_error_says_to_do_with_other_dtypes_keeps_momenta(saved: Path) -> None:
    """Load into the saved dtypes, convert the model; the optimizer follows."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = fresh()
        optimizer = Distributed(model.parameters(), process_group=group)
        checkpoint.load(saved, model, optimizer)
        train(model, optimizer, rank, range(2, 3))
        model[2].to(torch.bfloat16)
        kept = {name: optimizer.state[param]["exp_avg"].clone() for name, param in model.named_parameters()}
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        assert model[2].weight.dtype == torch.bfloat16 and optimizer.param_groups[0]["t"] == 4
        for name, param in model.named_parameters():
            momentum = optimizer.state[param]["exp_avg"]
            assert momentum.dtype == torch.float32 and torch.equal(momentum, kept[name] * 0.99) and momentum.any()

    succeed(world(2, work))
