"""Real processes: before and after the group exists, lost workers, groups of some workers, torchrun."""

import copy
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import launch, meet
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from dlion import DistributedLion, checkpoint, local_gradients
from dlion.errors import DlionError, ExchangeError, GroupNotReadyError
from dlion.voting import gathering

pytestmark = pytest.mark.processes


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 3))


def backward(model: nn.Module, rank: int) -> list[float]:
    model.zero_grad()
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    model(inputs).square().mean().backward()
    return next(model.parameters()).grad.flatten().tolist()


def values(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def refused(step: Any) -> str:
    """What the error says that says no group is ready."""
    try:
        step()
    except GroupNotReadyError as error:
        return str(error)
    return "nothing"


def built_too_early(rank: int, size: int, folder: Path) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = str(size)
    model = small_model(seed=rank)
    optimizer = DistributedLion(model.parameters(), lr=0.01)
    get_optimizer_state_dict(model, optimizer)  # a dry step, which needs nobody
    start = values(model)
    backward(model, rank)
    said = [refused(optimizer.step), refused(lambda: local_gradients(model))]
    assert values(model) == start and optimizer.param_groups[0]["t"] == 0

    meet(folder, "first", rank, size)
    local_gradients(model)
    for _ in range(3):
        backward(model, rank)
        optimizer.step()
    apart = copy.deepcopy(model)
    trained = values(model)

    del os.environ["WORLD_SIZE"]  # as where a program made its processes itself
    dist.destroy_process_group()
    backward(model, rank)
    said.append(refused(optimizer.step))
    assert values(model) == trained and optimizer.param_groups[0]["t"] == 3

    meet(folder, "second", rank, size)
    wrapped = DistributedDataParallel(model)
    local_gradients(wrapped)
    again = copy.deepcopy(wrapped)  # which has no hook
    local_gradients(again)
    grads = [backward(wrapped, rank), backward(again, rank), backward(apart, rank)]
    optimizer.step()
    dist.destroy_process_group()
    return {"said": said, "grads": grads, "values": values(model), "t": optimizer.param_groups[0]["t"]}


def test_an_optimizer_built_before_its_group_never_trains_apart(tmp_path: Path) -> None:
    first, second = launch(tmp_path, 2, built_too_early)
    assert first["values"] == second["values"] and first["t"] == second["t"] == 4
    for said in (first["said"], second["said"]):
        assert "WORLD_SIZE=2" in said[0] and "DistributedLion.step()" in said[0]
        assert "WORLD_SIZE=2" in said[1] and "local_gradients" in said[1]
        assert "2 workers was destroyed" in said[2]
    for worker in (first, second):
        wrapped, again, bare = worker["grads"]
        assert wrapped == again == bare
    assert first["grads"][0] != second["grads"][0]


def one_dies(rank: int, size: int, folder: Path) -> dict[str, Any]:
    meet(folder, "store", rank, size)
    model = small_model()
    optimizer = DistributedLion(model.parameters(), lr=0.01, topology="sharded", bucket_bytes=8)
    for step in range(1000):
        backward(model, rank)
        if rank == 1 and step == 5:
            os._exit(7)
        began = time.monotonic()
        try:
            optimizer.step()
        except ExchangeError as error:
            return {"step": step, "seconds": time.monotonic() - began, "said": str(error)}
    return {}


def test_a_killed_process_is_an_error_in_the_others_at_once(tmp_path: Path) -> None:
    results = launch(tmp_path, 3, one_dies)
    assert results[1] == 7
    # who has no connection to it hears of it from the one that has
    assert any("at t=5, when a connection was closed" in results[rank]["said"] for rank in (0, 2))
    for rank in (0, 2):
        assert results[rank]["step"] == 5 and results[rank]["seconds"] < 15
        assert f"rank {rank} of 3 lost another worker: rank 1 did not arrive within" in results[rank]["said"]
        assert "at t=5" in results[rank]["said"]
        assert "checkpoint" in results[rank]["said"]


def some_of_four(rank: int, size: int, folder: Path) -> dict[str, Any]:
    meet(folder, "store", rank, size)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, other = pairs[rank // 2], pairs[1 - rank // 2]
    everyone = small_model()
    models = [copy.deepcopy(everyone), copy.deepcopy(everyone)]
    within = DistributedLion(models[0].parameters(), lr=0.01, process_group=mine)
    across = DistributedLion(models[1].parameters(), lr=0.01, topology="sharded")  # of all four
    for _ in range(3):
        for model, optimizer in zip(models, (within, across), strict=True):
            backward(model, rank)
            optimizer.step()
    try:
        DistributedLion(everyone.parameters(), process_group=other)
        said = "nothing"
    except ValueError as error:
        said = str(error)

    late = DistributedLion(small_model().parameters(), lr=0.01, timeout=1.5)
    began, missing = time.monotonic(), "nobody"
    if rank != 3:
        try:
            late.step()
        except DlionError as error:
            missing = str(error)
    waited = time.monotonic() - began
    dist.barrier()
    return {"values": [values(model) for model in models], "said": said, "missing": missing, "waited": waited}


def test_groups_of_some_workers_and_of_all_at_once(tmp_path: Path) -> None:
    results = launch(tmp_path, 4, some_of_four)
    pairs, together = zip(*(result["values"] for result in results), strict=True)
    assert pairs[0] == pairs[1] and pairs[2] == pairs[3] and pairs[0] != pairs[2]
    assert together[0] == together[1] == together[2] == together[3] and together[0] not in pairs
    for rank, result in enumerate(results):
        assert "not a member" in result["said"]
        if rank != 3:
            assert "rank 3 did not come" in result["missing"] and "timeout=" in result["missing"]
            assert 1.4 < result["waited"] < 10


def in_unequal_groups(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Rank 0 is a member of two groups more than the others when dlion makes its own, and rank 1 later of one more."""
    meet(folder, "store", rank, size)
    dist.new_group([0])
    dist.new_group([0], use_local_synchronization=True) if rank == 0 else None
    model = local_gradients(small_model())
    optimizer = DistributedLion(model.parameters(), lr=0.01)
    backward(model, rank)
    optimizer.step()
    dist.new_group([1])
    checkpoint.save(folder / "saved", model, optimizer, timeout=20)
    if rank:  # as where ranks of a mesh save that are not all
        dist.new_group([2], use_local_synchronization=True) if rank == 2 else None
        dist.barrier(gathering([1, 2], timedelta(seconds=20)))
    dist.destroy_process_group()
    return {"values": values(model)}


def test_workers_may_be_members_of_unequal_numbers_of_groups(tmp_path: Path) -> None:
    """torch names a group after its ranks and that number: the first step waited until the timeout."""
    first, *others = launch(tmp_path, 3, in_unequal_groups, seconds=40)
    assert all(other == first for other in others)
    assert (tmp_path / "saved" / "manifest.json").is_file()


def saves_alone(rank: int, size: int, folder: Path) -> str:
    meet(folder, "store", rank, size)
    model = local_gradients(small_model())
    optimizer = DistributedLion(model.parameters(), lr=0.01)
    backward(model, rank)
    optimizer.step()
    if rank == 0:
        try:
            checkpoint.save(folder / "saved", model, optimizer, timeout=1)
        except ExchangeError as error:
            (folder / "said").write_text(str(error))
    else:
        while not (folder / "said").exists():
            time.sleep(0.05)  # until the other has given up
    return (folder / "said").read_text()


def test_a_worker_that_saves_alone_is_told_that_all_must(tmp_path: Path) -> None:
    said = launch(tmp_path, 2, saves_alone)
    assert "all 2 workers to call dlion.checkpoint.save or load, and rank 1 did not come" in said[0]
    assert "not on rank 0 alone" in said[0]


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import dlion

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)  # DDP broadcasts rank 0's parameters
model = DistributedDataParallel(nn.Linear(6, 2))
dlion.local_gradients(model)
optimizer = dlion.DistributedLion(model.parameters(), lr=0.01)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
pair = [torch.empty(12), torch.empty(12)]
for name, tensor in (("gradients", model.module.weight.grad), ("parameters", model.module.weight.detach())):
    dist.all_gather(pair, tensor.flatten())
    if rank == 0:
        print(name, "equal" if torch.equal(*pair) else "differ", flush=True)
dist.destroy_process_group()
"""


def test_torchrun_starts_a_script_that_votes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = Path(__file__).resolve().parent.parent
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["gradients differ", "parameters equal"], done.stdout


def waits_for_ever(rank: int, size: int, folder: Path) -> bool:
    return rank == 0 or threading.Event().wait()


def test_a_rank_that_hangs_says_where(tmp_path: Path) -> None:
    """Of these tests themselves: one that does not end was a worker of theirs that was gone without a word."""
    with pytest.raises(AssertionError, match=r"^rank 1 hangs:\n(.*\n)*.* in waits_for_ever"):
        launch(tmp_path, 2, waits_for_ever, seconds=10)
