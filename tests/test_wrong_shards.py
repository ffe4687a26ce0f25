"""Shards that do not belong together are found before the first step: wrong pairs of replicas, parameters of FSDP1."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hsdp_runs import backward, mesh_of, sharded
from processes import launch, meet
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from dlion import DistributedLion, local_gradients
from dlion.errors import AgreementError

pytestmark = pytest.mark.processes
PAIRS = ([0, 3], [1, 2])  # of the mesh [[0, 1], [2, 3]], whose columns are [0, 2] and [1, 3]


def said_by(call: Any) -> str:
    try:
        call()
    except (ValueError, AgreementError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrongly_paired(rank: int, size: int, folder: Path) -> dict[str, Any]:
    mesh = mesh_of(folder, rank, size)
    pair = [dist.new_group(ranks) for ranks in PAIRS][[rank in ranks for ranks in PAIRS].index(True)]
    torch.manual_seed(0)
    model = nn.Linear(6, 4)  # equal shards: nothing but their places tells them apart
    fully_shard(model, mesh=mesh["shard"])
    before = [param.to_local().clone() for param in model.parameters()]
    said = {"local_gradients": said_by(lambda: local_gradients(model, pair))}
    said["kept"] = all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, process_group=pair)
    model(torch.randn(3, 6)).square().sum().backward()
    said["step"] = said_by(optimizer.step)
    return said


def test_replicas_whose_shards_lie_elsewhere_are_refused(tmp_path: Path) -> None:
    for rank, said in enumerate(launch(tmp_path, 4, wrongly_paired)):
        pair = next(ranks for ranks in PAIRS if rank in ranks)
        assert said["kept"] and said["local_gradients"].startswith("AgreementError: the workers' models differ")
        assert f"on rank {pair[1]} " in said["step"] and "is the shard that begins at [" in said["step"]


def by_fsdp1(rank: int, size: int, folder: Path) -> list[str]:
    meet(folder, "store", rank, size)
    said = []
    for kept in (False, True):
        torch.manual_seed(0)
        model = FullyShardedDataParallel(nn.Linear(6, 5), use_orig_params=kept, device_id=torch.device("cpu"))
        said.append(said_by(lambda model=model: local_gradients(model)))
        if not kept:
            said.append(said_by(lambda model=model: DistributedLion(model.parameters(), lr=0.1)))
    return said


def test_fsdp1_is_refused_with_what_to_use_in_its_place(tmp_path: Path) -> None:
    for said in launch(tmp_path, 2, by_fsdp1):
        assert len(said) == 3 and all("averages gradients among all ranks" in text for text in said)
        assert all("fully_shard (FSDP2)" in text for text in said)


def by_columns(rank: int, size: int, folder: Path) -> list[str]:
    """What is said where the ranks of one shard have another learning rate than those of the other one."""
    mesh = mesh_of(folder, rank, size)
    voters = mesh["replicate"].get_group()
    model = sharded(mesh["shard"], seed=0)
    local_gradients(model, voters)
    said = []
    for rates in ((0.01, 0.01), (0.01, 0.02)):
        optimizer = DistributedLion(model.named_parameters(), lr=rates[rank % 2], process_group=voters)
        backward(model, rank, 0)
        said.append(said_by(optimizer.step))
    return said


def test_shards_of_one_worker_that_step_apart_are_named(tmp_path: Path) -> None:
    for rank, (fine, apart) in enumerate(launch(tmp_path, 4, by_columns)):
        first, second = rank // 2 * 2, rank // 2 * 2 + 1
        assert fine == "nothing"
        assert f"on rank {second} group 0 has lr=0.02 instead of 0.01 (compared with rank {first})" in apart
