"""Sharded parameters (DTensors): votes go across replicas, never among ranks that hold shards of one parameter."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlion.errors import ranks_text
from dlion.layout import named


def trained(param_groups: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters of what is not frozen."""
    return ((name, param) for _, _, name, param in named(param_groups) if param.requires_grad)


def is_sharded(tensor: Tensor) -> bool:
    """Whether several ranks together hold the tensor: a DTensor."""
    return hasattr(tensor, "device_mesh")


def offset_of(tensor: Tensor) -> tuple[int, ...]:
    """Where in the whole tensor the first element of the part here lies."""
    if not is_sharded(tensor):
        return (0,) * tensor.dim()
    (block,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # what torch itself saves by
    return tuple(block.offsets)


def ranks_of_shards(params: Iterable[tuple[str, Tensor]]) -> list[int]:
    """The ranks that together hold the shards of parameters, in the order of their mesh; none where all are whole.

    Raises:
        ValueError: they are sharded over several meshes.
    """
    first: tuple[str, list[int]] | None = None
    for name, param in params:
        if is_sharded(param):
            ranks = param.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
            if first is None:
                first = name, ranks
            elif ranks != first[1]:
                raise ValueError(
                    f"{first[0]} is sharded over {ranks_text(first[1])} and {name} over {ranks_text(ranks)}, and one "
                    "worker is one set of ranks: shard all parameters over the same mesh"
                )
    return first[1] if first is not None else []


def in_shards(values: Tensor, param: Tensor) -> Tensor:
    """A DTensor sharded as `param`, whose local part is `values`."""
    from torch.distributed.tensor import DTensor  # slow to import, and who shards has done so

    return DTensor.from_local(
        values,
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=param.shape,
        stride=torch.empty(param.shape, device="meta").stride(),
    )


def put_back_shards(model: nn.Module) -> None:
    """Have a model that FSDP2 shards hold its shards again, and not whole parameters.

    Those it leaves after a forward pass without a backward one, of an evaluation for instance, or of a frozen layer.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import; and who has not, has not sharded by it
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


FSDP1 = (
    "FullyShardedDataParallel averages gradients among all ranks that hold shards, and leaves nobody to vote with: "
    "shard with fully_shard (FSDP2) over the inner dimension of a mesh, and vote over the outer one"
)
TWO_DIMENSIONS = (
    'make a mesh of two dimensions, mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", '
    '"shard")), shard over the inner one alone, fully_shard(module, mesh=mesh["shard"]), and give the group of the '
    'other, mesh["replicate"].get_group(), as process_group'
)


def check_shards(params: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Find out whether sharded parameters go together with the workers that vote on them.

    Args:
        params: names and trainable parameters.
        group: the workers that vote; None: there is one alone.

    Raises:
        ValueError: workers that vote together hold shards of one parameter, whose gradients were averaged among them;
            or some parameters are sharded and others are not, whose gradients were not averaged among the shards.
    """
    every = list(params)
    sharded: dict[str, Any] = {name: param for name, param in every if is_sharded(param)}
    if not sharded:
        return
    voters = set(dist.get_process_group_ranks(group)) if group is not None else {dist.get_rank()}
    for name, param in sharded.items():
        mesh = set(param.device_mesh.mesh.flatten().tolist())
        if len(mesh & voters) > 1:
            raise ValueError(
                f"{name} is sharded over {ranks_text(sorted(mesh))}, and {ranks_text(sorted(mesh & voters))} of them "
                f"vote on it together: {TWO_DIMENSIONS}"
            )
    for name, _ in every:
        if name not in sharded:
            raise ValueError(
                f"{name} is whole on every rank while {next(iter(sharded))} is sharded, so its gradient is averaged "
                "over no other rank, and ranks that hold shards would train apart: shard it too, or freeze it"
            )
