"""Sharded parameters (DTensors): votes go across replicas, never among ranks that hold shards of one parameter."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dlion.errors import ranks_text
from dlion.layout import named


def trained(param_groups: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters of what is not frozen."""
    return ((name, param) for _, _, name, param in named(param_groups) if param.requires_grad)


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
    sharded = {name: param for name, param in every if hasattr(param, "device_mesh")}
    if not sharded:
        return
    voters = set(dist.get_process_group_ranks(group)) if group is not None else {dist.get_rank()}
    for name, param in sharded.items():
        mesh = set(param.device_mesh.mesh.flatten().tolist())
        if len(mesh & voters) > 1:
            raise ValueError(
                f"{name} is sharded over {ranks_text(sorted(mesh))}, and {ranks_text(sorted(mesh & voters))} of them "
                'vote on it together: shard over the inner dimension alone, fully_shard(module, mesh=mesh["shard"]), '
                'and give the group of the other, mesh["replicate"].get_group(), as process_group'
            )
    for name, _ in every:
        if name not in sharded:
            raise ValueError(
                f"{name} is whole on every rank while {next(iter(sharded))} is sharded, so its gradient is averaged "
                "over no other rank, and ranks that hold shards would train apart: shard it too, or freeze it"
            )
