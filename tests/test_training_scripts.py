"""What a training script must show, in real processes: a plain loop, and one around DistributedDataParallel."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import launch
from ranks import bytes_sent, gradients, held, meet_as_launched, told
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlion import DistributedLion, checkpoint, local_gradients

pytestmark = pytest.mark.processes

STEPS, SAVED = 6, 3
VALUES = 4  # parameters of the model


class Run:
    """A model and its optimizer; each rank begins with other parameters and has other data."""

    def __init__(self, rank: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(rank)
        self.bare = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 3))
        self.model = wrap(self.bare)
        self.optimizer = DistributedLion(self.bare.parameters(), lr=0.01, topology="sharded")
        self.rank = rank

    def steps(self, first: int, last: int, between: Callable[[nn.Module], None] = lambda model: None) -> list[Any]:
        """The gradients of each step; `between` backward and the optimizer's step something may change them."""
        seen = []
        for step in range(first, last):
            noise = torch.Generator().manual_seed(100 * step + self.rank)
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 5, generator=noise)).square().mean().backward()
            between(self.model)
            seen.append(gradients(self.bare))
            self.optimizer.step()
        return seen


def average(model: nn.Module) -> None:
    """What a plain loop does that trains with any other optimizer."""
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def work(rank: int, size: int, folder: Path, script: str) -> dict[str, Any]:
    meet_as_launched(folder, rank, size)
    wrap = DistributedDataParallel if script == "ddp" else lambda model: model
    said: list[str] = []
    with told(said):
        whole = Run(rank, lambda model: local_gradients(wrap(model)))
        seen = whole.steps(0, SAVED)
        checkpoint.save(folder / "step", whole.model, whole.optimizer, extra=SAVED)
        seen += whole.steps(SAVED, STEPS)
    sent = [whole.optimizer.stats.bytes_sent, STEPS * bytes_sent(whole.bare.parameters(), size)]
    found = {"gradients": seen, "whole": held(whole.bare, whole.optimizer), "bytes": sent, "said": said}

    again = Run(rank, lambda model: local_gradients(wrap(model)))
    again.steps(checkpoint.load(folder / "step", again.model, again.optimizer), STEPS)

    averaging: list[str] = []
    with told(averaging):
        wrong = Run(rank, wrap if script == "ddp" else local_gradients)
        averaged = wrong.steps(0, 4, *([] if script == "ddp" else [average]))
    return found | {"again": held(again.bare, again.optimizer), "averaged": averaged, "averaging": averaging}


@pytest.fixture(scope="module", params=["plain", "ddp"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(tmp_path_factory.mktemp(request.param), 2, partial(work, script=request.param))


def test_gradients_stay_local_and_parameters_equal(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert len(first["gradients"]) == STEPS
    assert all(a != b for a, b in zip(first["gradients"], second["gradients"], strict=True))
    assert first["whole"][:VALUES] == second["whole"][:VALUES]
    assert first["whole"][VALUES:] != second["whole"][VALUES:]  # momenta are each worker's own
    assert not first["said"] and not second["said"]


def test_bytes_are_those_of_the_formula(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        sent, expected = rank["bytes"]
        assert sent == expected


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["again"] == rank["whole"]


def test_averaging_left_on_is_reported(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["averaged"] == second["averaged"]
    for rank in ranks:
        assert len([text for text in rank["averaging"] if "averaged already" in text]) == 1
