"""Steps that no host waits for, by the Triton kernels: the bits of steps on the host."""

from typing import Any

import pytest
import torch
from resident_model import Model
from world import succeed, world

from dlion import Distributed
from dlion.ops import triton
from dlion.resident import by_triton, choice

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def trained(group: Any, rank: int, dtype: torch.dtype, vote: dict[str, Any]) -> list[torch.Tensor]:
    model = Model().to(dtype)
    how = {"lr": 0.01, "weight_decay": 0.1, "bucket_bytes": 16, "verify_every": 2} | vote
    optimizer = Distributed(model.named_parameters(), process_group=group, **how)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        if step == 2:
            model.b.grad[0, 0] = float("inf")
        optimizer.step()
    optimizer.check()
    momenta = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    return [*model.copies(), *(momentum.clone() for momentum in momenta), torch.tensor(optimizer.stats.abstentions)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("vote", [{"method": "dlion-mavo"}, {"method": "dlion-avg", "zeros": "exact"}])
def test_kernels_and_steps_on_the_device_fit_together(
    dtype: torch.dtype, vote: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # one worker: Triton's interpreter takes one thread
    wanted = succeed(world(1, lambda rank, group: trained(group, rank, dtype, vote)))
    launches = []
    launch = triton._launch
    monkeypatch.setattr(triton, "_launch", lambda *told: launches.append(told[0]) or launch(*told))
    monkeypatch.setattr(choice, "is_accelerator", lambda device: True)
    monkeypatch.setattr("dlion.renewal.kernels_for", lambda name: by_triton)
    found = succeed(world(1, lambda rank, group: trained(group, rank, dtype, vote)))
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert bool(launches) == (dtype != torch.float64)  # which Triton leaves to the reference
