"""Each worker's own momenta by torch's ways of saving: none gives a worker another one's, or waits for it. And the
checkpoint that must load for ever.
"""

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import fresh, train, whole
from torch.distributed.checkpoint import state_dict as dcp
from world import succeed, world

from dlion import Distributed, checkpoint
from dlion.methods import METHODS

GOLDEN = Path(__file__).parent / "golden" / "checkpoint-format-2"


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("way", ["state_dict", "get_optimizer_state_dict"])
def test_a_file_for_each_worker_keeps_its_own_momenta(way: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Any:
        model = fresh()
        optimizer = Distributed(model.named_parameters(), lr=0.01, process_group=group)
        train(model, optimizer, rank, range(3))
        model[0].requires_grad_(False)
        train(model, optimizer, rank, range(3, 5))
        torch_way = way == "get_optimizer_state_dict"
        model.zero_grad()
        saved = dcp.get_optimizer_state_dict(model, optimizer) if torch_way else optimizer.state_dict()
        kept, parameters = through_file(saved), through_file(model.state_dict())

        resumed = fresh()
        resumed.load_state_dict(parameters)
        again = Distributed(resumed.named_parameters(), lr=9.0, process_group=group)
        if torch_way:
            dcp.set_optimizer_state_dict(resumed, again, kept)
        else:
            again.load_state_dict(kept)
        assert optimizer.state[model[0].weight]["exp_avg"].any()
        for mine, theirs in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(optimizer.state[mine]["exp_avg"], again.state[theirs]["exp_avg"])
        model[0].requires_grad_(True)
        train(model, optimizer, rank, range(5, 8)), train(resumed, again, rank, range(5, 8))
        ended = whole(model, optimizer)["tensors"]
        assert all(torch.equal(value, ended[name]) for name, value in whole(resumed, again)["tensors"].items())
        return again.state[resumed[2].weight]["exp_avg"]

    first, second = succeed(world(2, work))
    assert not torch.equal(first, second)


COLLECTIVES = (
    "all_gather_single all_to_all_single all_reduce all_gather broadcast gather scatter barrier all_gather_object "
    "broadcast_object_list gather_object scatter_object_list new_group reduce send recv isend irecv"
).split()


@pytest.mark.parametrize("method", METHODS)
def test_a_state_dict_never_communicates(method: str) -> None:
    """One worker may save alone: frameworks do."""
    both = threading.Barrier(2, timeout=30)
    called = []

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = fresh()
        optimizer = Distributed(model.named_parameters(), method, process_group=group)
        train(model, optimizer, rank, range(2))
        both.wait()
        if rank == 1:
            model.zero_grad()
            with pytest.MonkeyPatch.context() as patched:
                for name in COLLECTIVES:
                    patched.setattr(dist, name, lambda *_, **__: called.append(1))
                optimizer.load_state_dict(optimizer.state_dict())
                dcp.set_optimizer_state_dict(model, optimizer, dcp.get_optimizer_state_dict(model, optimizer))
                assert called == []
                optimizer.stats.state_dict()
                with pytest.raises(AttributeError):  # a step does call, and gets None
                    optimizer.step()
                assert called
        both.wait()

    succeed(world(2, work))


# ---- the golden file


def golden_state(rank: int) -> dict[str, Any]:
    """What the two workers of the golden checkpoint had: numbers that every float holds."""
    return {
        "parameters": [torch.arange(6.0).view(2, 3) / 8, torch.tensor([0.5, -0.25])],
        "momenta": [torch.arange(6.0).view(2, 3) / 16 - rank, torch.tensor([0.125, 2.0]) * (rank + 1)],
        "buffer": torch.tensor([1.0 + rank, 3.0]),
        "counter": torch.tensor(10 + rank),
    }


def golden_model(rank: int | None) -> torch.nn.Module:
    """The model of the golden checkpoint; None: before it is loaded."""
    model = torch.nn.Linear(3, 2)
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("seen", torch.tensor(0))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    if rank is not None:
        state = golden_state(rank)
        with torch.no_grad():
            for param, value in zip(model.parameters(), state["parameters"], strict=True):
                param.copy_(value)
            model.mean.copy_(state["buffer"])
            model.seen.copy_(state["counter"])
    return model


def golden_save(path: Path) -> None:
    """How the golden checkpoint was made, once, by version 0.1.0. It stays as it is."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = golden_model(rank)
        optimizer = Distributed(
            model.named_parameters(), lr=0.25, betas=(0.5, 0.75), weight_decay=0.125, process_group=group
        )
        for param, value in zip(model.parameters(), golden_state(rank)["momenta"], strict=True):
            optimizer.state[param] = {"exp_avg": value}
        optimizer.param_groups[0]["t"] = 7
        optimizer.stats.load_state_dict({"steps": 9, "bytes_sent": 1234})
        extra = {"epoch": 3, "random": torch.arange(4, dtype=torch.uint8), "name": "golden"}
        checkpoint.save(path, model, optimizer, extra=extra | {"rank": rank}, notes={"made by": "0.1.0"})

    succeed(world(2, work))


@pytest.mark.parametrize("made", ["by version 0.1.0", "now"])
def test_the_golden_checkpoint_loads_for_ever(made: str, tmp_path: Path) -> None:
    path = GOLDEN if made != "now" else tmp_path / "now"
    if made == "now":
        golden_save(path)
    assert checkpoint.verify(path).notes == {"made by": "0.1.0"}

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model, state = golden_model(None), golden_state(rank)
        optimizer = Distributed(model.named_parameters(), process_group=group)
        extra = checkpoint.load(path, model, optimizer)
        assert extra.pop("random").tolist() == [0, 1, 2, 3]
        assert extra == {"epoch": 3, "name": "golden", "rank": rank}
        for param, value, momentum in zip(model.parameters(), state["parameters"], state["momenta"], strict=True):
            assert torch.equal(param, value) and torch.equal(optimizer.state[param]["exp_avg"], momentum)
        assert torch.equal(model.mean, state["buffer"]) and torch.equal(model.seen, state["counter"])
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["weight_decay"], group["t"]) == (0.25, (0.5, 0.75), 0.125, 7)
        assert (optimizer.stats.steps, optimizer.stats.bytes_sent) == (9, 1234)

    succeed(world(2, work))
    alone = golden_model(None)
    optimizer = Distributed(alone.named_parameters())
    assert checkpoint.load(path, alone, optimizer)["rank"] == 0
    assert torch.equal(optimizer.state[alone.bias]["exp_avg"], torch.tensor([0.1875, 3.0]))
    assert alone.mean.tolist() == [1.5, 3.0] and int(alone.seen) == 10
