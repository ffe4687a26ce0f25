"""Models sharded by FSDP2 over the inner dimension of a mesh, on data that are functions of (rank, step)."""

from pathlib import Path

import torch
from processes import meet
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

REPLICAS, SHARDS = 2, 2


def a_model(seed: int) -> nn.Module:
    """Rows of 37 and 11 elements: second shards begin inside a word. The last layer's second shard is empty."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(37, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))


def sharded(mesh: DeviceMesh, seed: int) -> nn.Module:
    model = a_model(seed)
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def backward(model: nn.Module, rank: int, step: int) -> None:
    """The gradient of this rank's own batch."""
    torch.manual_seed(1000 * rank + step)
    model.zero_grad()
    model(torch.randn(3, 37)).square().sum().backward()


def mesh_of(folder: Path, rank: int, size: int, shards: int = SHARDS) -> DeviceMesh:
    meet(folder, "store", rank, size)
    return init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard"))


def refusal(attempt: object) -> str:
    """What a ValueError says that `attempt()` raises."""
    try:
        attempt()  # type: ignore[operator]
    except ValueError as error:
        return str(error)
    return "nothing"
