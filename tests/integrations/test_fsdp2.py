"""FSDP2 within replicas and votes between them, on four real ranks: what differs, what is sent, what is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hsdp_runs import REPLICAS, SHARDS, backward, sharded
from processes import launch
from ranks import bytes_sent, meet_as_launched, refusal, told
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dlion import DistributedLion, checkpoint, local_gradients

pytestmark = pytest.mark.timeout(240)
STEPS, SAVED = 6, 3


class Run:
    """A model in shards, which begins with other parameters in each replica."""

    def __init__(self, mesh: DeviceMesh, rank: int) -> None:
        group = mesh["replicate"].get_group()
        self.model, self.rank = local_gradients(sharded(mesh["shard"], seed=rank // SHARDS), group), rank
        self.optimizer = DistributedLion(
            self.model.parameters(), lr=0.01, process_group=group, topology="sharded", verify_every=2
        )

    def steps(self, first: int, last: int) -> list[list[float]]:
        seen = []
        for step in range(first, last):
            backward(self.model, self.rank, step)
            seen.append([x for param in self.model.parameters() for x in param.grad.to_local().flatten().tolist()])
            self.optimizer.step()
        return seen

    @property
    def parameters(self) -> list[list[float]]:
        return [param.to_local().flatten().tolist() for param in self.model.parameters()]

    @property
    def momenta(self) -> list[list[float]]:
        states = [self.optimizer.state[param] for param in self.model.parameters()]
        return [state["exp_avg"].to_local().flatten().tolist() for state in states]


def work(rank: int, size: int, folder: Path) -> dict[str, Any]:
    meet_as_launched(folder, rank, size)
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))
    said: list[str] = []
    with told(said):
        whole = Run(mesh, rank)
        gradients = whole.steps(0, SAVED)
        checkpoint.save(folder / "saved", whole.model, whole.optimizer)
        gradients += whole.steps(SAVED, STEPS)
        again = Run(mesh, rank)
        checkpoint.load(folder / "saved", again.model, again.optimizer)
        again.steps(SAVED, STEPS)
    shards = [param.to_local() for param in whole.model.parameters()]
    return {
        "said": said,
        "gradients": gradients,
        "bytes": [whole.optimizer.stats.bytes_sent, STEPS * bytes_sent(shards, REPLICAS)],
        "whole": [whole.parameters, whole.momenta],
        "again": [again.parameters, again.momenta],
        "averaging": averaging(mesh, rank),
        "refused": refusal(lambda: local_gradients(sharded(mesh, 0), mesh["replicate"].get_group())),
    }


def averaging(mesh: DeviceMesh, rank: int) -> list[str]:
    """What is said to somebody who averages gradients between replicas as well."""
    wrong, said = Run(mesh, rank), list[str]()
    with told(said):
        for step in range(4):
            backward(wrong.model, rank, step)
            for param in wrong.model.parameters():
                dist.all_reduce(param.grad.to_local(), group=mesh["replicate"].get_group())
            wrong.optimizer.step()
    return said


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(tmp_path_factory.mktemp("fsdp2"), REPLICAS * SHARDS, work, seconds=200)


def test_gradients_differ_between_replicas_and_parameters_do_not(ranks: list[dict[str, Any]]) -> None:
    for shard in range(SHARDS):
        first, second = ranks[shard], ranks[SHARDS + shard]
        assert len(first["gradients"]) == STEPS
        assert all(a != b for a, b in zip(first["gradients"], second["gradients"], strict=True))
        assert first["whole"][0] == second["whole"][0] and first["whole"][1] != second["whole"][1]
    assert ranks[0]["whole"][0] != ranks[1]["whole"][0]
    assert not [text for rank in ranks for text in rank["said"] if "dlion" in text]


def test_bytes_are_those_of_the_formula_for_a_ranks_own_shards(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        sent, expected = rank["bytes"]
        assert sent == expected > 0


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["again"] == rank["whole"]


def test_averaging_between_replicas_is_reported(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert [text for text in rank["averaging"] if "averaged already" in text]
        assert rank["refused"].startswith("0.weight is sharded over ranks 0, 1, 2, 3, and ranks")
        assert 'fully_shard(module, mesh=mesh["shard"])' in rank["refused"]
