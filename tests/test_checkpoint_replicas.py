"""What is saved stands for all replicas, under a name that nothing whole has."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_runs import flipped, trained
from torch import nn
from world import succeed, world

from dlion import checkpoint
from dlion.errors import CheckpointError


@pytest.mark.parametrize("frozen", [False, True])
def test_replicas_that_drifted_apart_are_not_saved_as_one(frozen: bool, tmp_path: Path) -> None:
    """Whether they are trained or frozen: one copy stands for all workers."""

    def work(rank: int, group: dist.ProcessGroup) -> str:
        model, optimizer = trained(3, group, rank)
        if frozen:
            model.register_parameter("prior", nn.Parameter(torch.zeros(3), requires_grad=False))
        named = dict(model.named_parameters())
        name = "prior" if frozen else next(iter(named))
        before = named[name].detach().clone()
        with torch.no_grad():
            named[name].view(-1)[0] += float(rank == 1)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(tmp_path / "apart", model, optimizer)
        assert f"{name} on rank 1 is not that of rank 0" in str(caught.value)
        with torch.no_grad():
            named[name].copy_(before)
        checkpoint.save(tmp_path / "together", model, optimizer)
        return str(caught.value)

    first, second = succeed(world(2, work))
    assert first == second and not (tmp_path / "apart").exists()


def test_a_damaged_checkpoint_gives_up_its_name_and_is_kept(tmp_path: Path) -> None:
    """A run that went back to an older one comes to that step again, and could never save there."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = trained(3, group, rank)
        for _ in range(3):
            checkpoint.save(tmp_path / "3", model, optimizer)
            if rank == 0:
                spoilt = tmp_path / "3" / "__1_0.distcp"
                spoilt.write_bytes(flipped(spoilt.read_bytes()))
        checkpoint.save(tmp_path / "3", model, optimizer)
        with pytest.raises(CheckpointError, match="exists already"):
            checkpoint.save(tmp_path / "3", model, optimizer)

    with pytest.warns(UserWarning, match="is damaged.*and a new one gets its name"):
        succeed(world(2, work))
    assert checkpoint.latest(tmp_path) == tmp_path / "3"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".3.damaged-1", ".3.damaged-2", ".3.damaged-3", "3"]
