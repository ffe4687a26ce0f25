"""Every worker's state beside a framework's checkpoint, for frameworks with several optimizers."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from dlion import DistributedLion
from dlion.integrations import momenta


def made(steps: int) -> tuple[nn.Module, list[DistributedLion]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizers = [DistributedLion(layer.named_parameters(), lr=0.1) for layer in model.children()]
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return model, optimizers


def held(optimizer: DistributedLion) -> list[torch.Tensor]:
    return [optimizer.state[param]["exp_avg"] for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("lost", [[], [0], [1], [0, 1]])
def test_an_optimizer_without_its_state_is_named_and_the_others_have_theirs(lost: list[int], tmp_path: Path) -> None:
    model, optimizers = made(steps=3)
    momenta.save(tmp_path, [model], optimizers)
    folders = [tmp_path / "dlion", tmp_path / "dlion-1"]
    for number in lost:
        shutil.rmtree(folders[number])
    again, fresh = made(steps=1)
    with pytest.warns(UserWarning) if lost else pytest.MonkeyPatch.context() as warned:
        loaded = momenta.load(tmp_path, [again], fresh)
    assert loaded == [optimizer for number, optimizer in enumerate(fresh) if number not in lost]
    for number, (optimizer, saved) in enumerate(zip(fresh, optimizers, strict=True)):
        same = all(torch.equal(a, b) for a, b in zip(held(optimizer), held(saved), strict=True))
        assert same == (number not in lost)
    if lost:
        assert [str(folders[number]) in str(each.message) for number, each in zip(lost, warned, strict=True)]


def test_names_with_slashes_and_dots_stay_apart(tmp_path: Path) -> None:
    model = nn.Module()
    model.a = nn.Module()
    model.a.b = nn.Linear(2, 2)
    model.register_module("a/b", nn.Linear(2, 2))
    optimizer = DistributedLion(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = [param.detach().clone() for param in model.parameters()]
    momenta.save(tmp_path, [model], [optimizer])
    optimizer.step()
    assert momenta.load(tmp_path, [model], [optimizer]) == [optimizer]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
