"""A small model with every kind of parameter use, and a training loop that looks at what backward has sent."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dlion import Distributed

STEPS = 4
SMALL = 96  # bytes of a bucket: 768 elements, so that the model below has fifteen


class Branches(nn.Module):
    """Used twice: `shared`; used by some ranks in some steps: `sometimes`; used by nobody: `never`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Linear(9, 70)
        self.never = nn.Linear(3, 3)
        self.shared = nn.Linear(70, 70, bias=False)
        self.sometimes = nn.Linear(70, 70, bias=False)
        self.last = nn.Linear(70, 4)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.1

    def forward(self, inputs: Tensor, branch: bool) -> Tensor:
        hidden = self.shared(torch.tanh(self.shared(torch.tanh(self.first(inputs)))))
        return self.last(torch.tanh(self.sometimes(hidden) if branch else hidden))


MODEL = Branches()


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(8, 9, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: Any, rank: int, step: int) -> None:
    model(inputs_of(rank, step), branch=(rank + step) % 3 == 0).square().mean().backward()


def under_way(opt: Distributed) -> int:
    return len(opt._renewal._exchange.flight) if opt._renewal._exchange is not None else 0


def train(
    rank: int,
    group: object,
    change: Callable[[int, Branches, Distributed], None] | None = None,
    cls: Any = Distributed,
    **options: Any,
) -> tuple[Tensor, list[int], dict[str, Any]]:
    """Parameters after STEPS, the buckets that were under way after each backward, and the counters."""
    model = copy.deepcopy(MODEL)
    opt = cls(model.parameters(), process_group=group, **{"lr": 1e-3, "bucket_bytes": SMALL, **options})
    left = []
    for step in range(STEPS):
        opt.zero_grad()
        backward(model, rank, step)
        left.append(under_way(opt))
        if change is not None:
            change(step, model, opt)
        opt.step()
        assert under_way(opt) == 0
    return values(model), left, opt.stats.state_dict()
