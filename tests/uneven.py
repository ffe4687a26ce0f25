"""Workers in threads inside torch's `Join`, and a model whose gradients are noise."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

SHAPES = ((30, 5), (70,), ())
UNEVEN = (2, 6, 0, 6)  # steps for which each worker has data: one has none at all, and two finish last
LR = 0.01


def ranks_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Join` asks torch for the rank in a group, and a thread's group is not among those that torch knows.

    It also changes the filters of warnings, which threads share.
    """
    monkeypatch.setattr(dist, "get_rank", lambda group=None: group.rank())
    quiet = SimpleNamespace(simplefilter=lambda _: None, warn=warnings.warn)
    monkeypatch.setattr("torch.distributed.algorithms.join.warnings", quiet)


class Net(nn.Module):
    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.values = nn.ParameterList([torch.randn(shape, generator=generator) for shape in SHAPES])

    def backward(self, rank: int, step: int) -> None:
        """Noise as gradients."""
        noise = torch.Generator().manual_seed(100 * step + rank)
        terms = [(param * torch.randn(param.shape, generator=noise)).sum() for param in self.values]
        self.zero_grad()
        sum(terms, torch.zeros(())).backward()

    def tensors(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.values]
