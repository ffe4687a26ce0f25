"""Gradient scalers over steps that no host waits for: who overflows rests, which only the device knows."""

from typing import Any

import pytest
import torch
from resident_model import on_device
from test_scaling import LR, OVERFLOWS, WORKERS, Net, backward, equal, result
from torch.amp import GradScaler
from unread import read, unread, watch
from world import succeed, world

from dlion import Distributed, copies
from dlion.resident import choice
from dlion.resident.exchange import ResidentExchange

assert watch and on_device

STEPS = 6
OPTIONS: list[dict[str, Any]] = [
    {},
    {"zeros": "exact", "topology": "server"},
    {"method": "dlion-avg", "nonfinite": "skip"},
    {"nonfinite": "raise"},
    {"momentum_dtype": torch.bfloat16, "topology": "sharded"},
]


def scaled(rank: int, group: Any, explicit: bool, dtype: torch.dtype, **options: Any) -> Any:
    """Train under a scaler; what it ends with after each step, the statistics and the scale."""
    model, scaler = Net(dtype), GradScaler("cpu", init_scale=2.0 ** (8 + rank), growth_interval=2)
    optimizer = Distributed(model.parameters(), lr=LR, process_group=group, bucket_bytes=16, verify_every=0, **options)
    results = []
    for step in range(STEPS):
        backward(model, scaler, rank, step)
        if step == 1:
            model.values[1].grad = None  # its momentum moves where this worker votes, and rests where not
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        results.append(result(model, optimizer))
    optimizer.check()
    return results, optimizer.stats.state_dict(), scaler.get_scale(), type(optimizer._renewal._exchange)


# unscale_ itself refuses float16 gradients
@pytest.mark.wide(4)
@pytest.mark.parametrize(("dtype", "explicit"), [(torch.float32, False), (torch.float32, True), (torch.float16, False)])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_bits_are_those_of_the_host(
    options: dict[str, Any], dtype: torch.dtype, explicit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = succeed(world(WORKERS, lambda r, g: scaled(r, g, explicit, dtype, **options)))
    monkeypatch.setattr(choice, "is_accelerator", lambda device: False)
    host = succeed(world(WORKERS, lambda r, g: scaled(r, g, explicit, dtype, **options)))
    for (results, stats, scale, kind), (others, wanted, other_scale, _) in zip(device, host, strict=True):
        assert kind is ResidentExchange and equal(results, others) and scale == other_scale
        assert stats == wanted and stats["abstentions"] > 0 and stats["skipped"] == 0
        assert equal(results[-1][0], device[0][0][-1][0])


def test_no_step_under_a_scaler_reads_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = copies.Copy.heard

    def allowed(self: copies.Copy) -> list[Any]:
        with read():  # what the device has copied for the host
            return heard(self)

    monkeypatch.setattr(copies.Copy, "heard", allowed)

    def work(rank: int, group: Any) -> None:
        model, scaler = Net(), GradScaler("cpu", init_scale=2.0**8)
        optimizer = Distributed(model.parameters(), lr=LR, process_group=group, nonfinite="skip")
        for step in range(STEPS):
            backward(model, scaler, rank, step)
            optimizer.found_inf = torch.tensor(float(rank == 1 and step in OVERFLOWS))
            optimizer.grad_scale = torch.tensor(2.0**8)
            if step == 0:
                optimizer.step()
                continue
            with unread():
                optimizer.step()
        optimizer.check()
        assert optimizer.stats.abstentions == len(OVERFLOWS)

    succeed(world(WORKERS, work))
