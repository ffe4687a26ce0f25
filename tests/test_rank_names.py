"""Errors name ranks as launchers know them, also where workers vote in a group of some of them."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import launch, meet
from torch import nn

from dlion import DistributedLion, agreement, checkpoint, local_gradients
from dlion.errors import DlionError

VOTERS = [1, 3]  # of four


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except DlionError as error:
        return str(error)
    return "nothing"


def made(group: dist.ProcessGroup, **options: Any) -> tuple[nn.Module, DistributedLion]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    return model, DistributedLion(model.named_parameters(), process_group=group, **{"lr": 0.01, **options})


def step(model: nn.Module, optimizer: DistributedLion) -> None:
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(rows).square().mean().backward()
    optimizer.step()


def voter(group: dist.ProcessGroup, folder: Path) -> dict[str, Any]:
    strange = dist.get_rank() == VOTERS[1]
    said: dict[str, Any] = {}
    model, optimizer = made(group, lr=0.01 + strange)
    said["lr"] = said_by(lambda: step(model, optimizer))
    model, optimizer = made(group, rounding="nearest" if strange else "stochastic")
    said["options"] = said_by(lambda: step(model, optimizer))
    model, optimizer = made(group, nonfinite="raise")
    if strange:
        model.bias.register_hook(lambda grad: grad * float("nan"))
    said["not finite"] = said_by(lambda: step(model, optimizer))
    model, optimizer = made(group)
    with torch.no_grad():
        model.bias += strange
    said["first step"] = said_by(lambda: step(model, optimizer))
    said["models"] = said_by(lambda: local_gradients(nn.Linear(5, 3 + strange), process_group=group))
    model, optimizer = made(group)
    step(model, optimizer)
    with torch.no_grad():
        model.bias += strange
    said["replicas"] = said_by(optimizer.verify_replicas)
    said["saving"] = said_by(lambda: checkpoint.save(folder / f"apart-{strange}", model, optimizer))
    if not strange:
        said["absent"] = said_by(lambda: step(model, optimizer))
    return said


def vote_in_a_group(rank: int, size: int, folder: Path) -> dict[str, Any] | None:
    meet(folder, "store", rank, size)
    group = dist.new_group(VOTERS, timeout=timedelta(seconds=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = voter(group, folder) if rank in VOTERS else None
    dist.barrier()
    dist.destroy_process_group()
    return said


@pytest.mark.processes
def test_errors_of_a_group_of_some_ranks_name_them_as_launchers_do(tmp_path: Path) -> None:
    found = launch(tmp_path, 4, vote_in_a_group)
    assert found[0] is None and found[2] is None
    for said in (found[1], found[3]):
        assert "on rank 3 group 0 has lr=1.01 instead of 0.01 (compared with rank 1)" in said["lr"]
        assert "on rank 3 rounding='nearest' instead of 'stochastic' (compared with rank 1)" in said["options"]
        assert "bias on rank 3" in said["not finite"] and "rank 1" not in said["not finite"]
        assert "those of rank 3 are not those of rank 1" in said["first step"]
        assert "rank 3 has [['weight', [4, 5], 'float32']]" in said["models"].replace("torch.", "")
        assert "on rank 3 bias differs (compared with rank 1)" in said["replicas"]
        assert "rank 3 saves 'apart-True' and rank 1 'apart-False'" in said["saving"]
    assert found[1]["absent"].startswith("rank 1 of the group of ranks 1, 3 lost another worker: rank 3 did not arrive")


def test_whom_a_verdict_accuses_is_named_only_where_there_is_such_a_worker() -> None:
    reports = [
        {"status": 0, "version": 1, "t": 0, "hyper": [], "options": {}, "parameters": [], "frozen": []} for _ in VOTERS
    ]
    assert "a row of rank 3 has another" in agreement.explain_hyper_parameters(reports, VOTERS, 1)
    for stranger in (2, 2**32 - 1):  # what a faulty owner may write; nobody
        assert "a row of some worker has another" in agreement.explain_hyper_parameters(reports, VOTERS, stranger)
        assert "on some worker alone" in str(agreement.explain_layout_change(reports, VOTERS, 5, False, stranger))
