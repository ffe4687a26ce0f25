"""Torch's `Join` around a DistributedDataParallel module and its optimizers, in real processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import launch, meet
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from dlion import Distributed, local_gradients
from dlion.ops.bits import checksum

pytestmark = pytest.mark.processes

BATCHES = (3, 7, 5)


class Normed(nn.Module):
    """With buffers, which DistributedDataParallel sends in every forward pass, and a parameter that some steps miss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.extra = nn.Linear(12, 12, bias=False)
        self.head = nn.Linear(12, 2)

    def forward(self, inputs: Tensor, extra: bool) -> Tensor:
        hidden = self.body(inputs)
        return self.head(self.extra(hidden) if extra else hidden)


def train(rank: int, size: int, folder: Path) -> Any:
    meet(folder, "join", rank, size)
    torch.manual_seed(rank)
    model = DistributedDataParallel(Normed(), find_unused_parameters=True)
    local_gradients(model)
    body = Distributed([*model.module.body.parameters(), *model.module.extra.parameters()], lr=0.01)
    head = Distributed(model.module.head.parameters(), "g-adamw", lr=0.01)
    schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in (body, head)]
    different = 0
    for epoch in range(2):
        batches = BATCHES[(rank + epoch) % size]
        with Join([model, body, head], schedulers=schedulers):
            for step in range(batches):
                noise = torch.Generator().manual_seed(1000 * epoch + 100 * step + rank)
                model.zero_grad()
                model(torch.randn(4, 6, generator=noise), step % 2 == 0).square().mean().backward()
                for optimizer in (body, head):
                    optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, checksum([param.detach() for param in model.parameters()]))
        different += len(set(everybody)) - 1
    assert different == 0
    rates = [optimizer.param_groups[0]["lr"] for optimizer in (body, head)]
    steps = [optimizer.param_groups[0]["t"] for optimizer in (body, head)]
    return everybody[rank], rates, steps, body.stats.abstentions


def test_a_wrapped_module_and_two_optimizers_with_uneven_batches(tmp_path: Path) -> None:
    results = launch(tmp_path, len(BATCHES), train)
    longest = max(BATCHES)
    missing = 2 * sum(longest - batches for batches in BATCHES)
    for values, rates, steps, abstentions in results:
        assert values == results[0][0]
        assert rates == results[0][1] and abs(rates[0] - 0.01 * 0.9 ** (2 * longest)) < 1e-12
        assert steps == [2 * longest] * 2 and abstentions == missing
