"""A small model whose optimizer takes its steps on the device, for which CPU tensors stand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlion import Distributed
from dlion.resident import choice


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import it: the one place that chooses says of every device that it is an accelerator."""
    monkeypatch.setattr(choice, "is_accelerator", lambda device: True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(150, generator=generator))
        self.b = nn.Parameter(torch.randn(5, 7, generator=generator))
        self.c = nn.Parameter(torch.randn(64, generator=generator))

    def fill(self, rank: int, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + rank)
        for param in self.parameters():
            param.grad = torch.randn(param.shape, generator=generator)

    def copies(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.parameters()]


def optimizer_of(model: Model, group: Any, **options: Any) -> Distributed:
    how = {"lr": 0.01, "bucket_bytes": 8, "timeout": 10, "verify_every": 0} | options
    return Distributed(model.named_parameters(), process_group=group, **how)


def other_lr(model: Model, optimizer: Distributed, rank: int, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.5 if (rank, step) == (1, 2) else 0.01
