"""A small model with buffers, trained by some workers on data that are functions of (rank, step)."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlion import Distributed, Simulation


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 70), nn.BatchNorm1d(70), nn.Linear(70, 3))
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator) / 4
    return model


MODEL = _model()
TARGET = torch.tensor([1.0, -1.0, 0.5])


def fresh() -> nn.Module:
    return copy.deepcopy(MODEL)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss: Tensor = (model(inputs) - TARGET).square().mean()
    return loss


def train(model: nn.Module, optimizer: Distributed, rank: int, steps: range) -> list[float]:
    """The losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(steps: int = 3, group: dist.ProcessGroup | None = None, rank: int = 0) -> tuple[nn.Module, Distributed]:
    """A model and its optimizer after some steps."""
    model = fresh()
    optimizer = Distributed(model.parameters(), lr=0.01, process_group=group)
    train(model, optimizer, rank, range(steps))
    return model, optimizer


def simulate(simulation: Simulation, steps: range) -> None:
    for step in steps:
        for rank in range(simulation.workers):
            with simulation.worker(rank):
                torch.autograd.backward(loss_of(simulation.model, rank, step))
        simulation.step()


def whole(model: nn.Module, optimizer: Distributed) -> dict[str, Any]:
    """Copies of everything that training goes on from."""
    state = {f"{name}/{index}": value for index, kept in enumerate(_in_order(optimizer)) for name, value in kept}
    kept = {**model.state_dict(), **state}
    # torch adds a key of its own when a state is loaded
    beside = ("params", "differentiable")
    hyper = [{key: value for key, value in group.items() if key not in beside} for group in optimizer.param_groups]
    counted = {"bytes": optimizer.stats.bytes_sent, "steps": optimizer.stats.steps}
    return copy.deepcopy({"tensors": kept, "hyper": hyper, "counted": counted})


def _in_order(optimizer: Distributed) -> list[list[tuple[str, Tensor]]]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [sorted(optimizer.state.get(param, {}).items()) for param in params]


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """To the bit."""
    same = a["tensors"].keys() == b["tensors"].keys() and a["hyper"] == b["hyper"] and a["counted"] == b["counted"]
    pairs = [(value, b["tensors"].get(name)) for name, value in a["tensors"].items()]
    return same and all(mine.dtype == other.dtype and torch.equal(mine, other) for mine, other in pairs)


def flipped(whole: bytes) -> bytes:
    """The content of a file, damaged in one bit."""
    middle = len(whole) // 2
    return whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
