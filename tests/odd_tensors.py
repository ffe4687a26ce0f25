"""A model of odd tensors for simulations and for real workers: gradients are a function of rank and step."""

from typing import Any

import torch
from torch import Tensor, nn

from dlion.simulate import Simulation

SHAPES = ((17, 3), (130,), (), (5, 64), (1,), (0, 4), (3, 7, 11))


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Module()
    for k, shape in enumerate(SHAPES):
        model.register_parameter(f"p{k}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
    model.p3.data = model.p3.data.t()  # not contiguous
    return model


def set_gradients(model: nn.Module, rank: int, step: int) -> None:
    """Other ones on each rank: some missing, some zeros, and now and then a NaN."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for k, param in enumerate(model.parameters()):
        if (k + rank + step) % 5 == 0:
            param.grad = None
            continue
        grad = torch.randn(param.shape, generator=generator)
        param.grad = torch.where(grad.abs() < 0.3, 0.0, grad).to(param.dtype)
    if (rank, step) in ((0, 2), (3, 3)):
        model.p1.grad = torch.full_like(model.p1, torch.nan)


def tensors_of(state_dict: dict[str, Any]) -> list[Tensor]:
    return [value for each in state_dict["state"].values() for _, value in sorted(each.items())]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def run(simulation: Simulation, steps: range) -> None:
    for step in steps:
        for rank in range(simulation.workers):
            with simulation.worker(rank):
                set_gradients(simulation.model, rank, step)
        simulation.step()
