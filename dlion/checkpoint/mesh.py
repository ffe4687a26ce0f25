"""Workers that are several ranks each: the rows of a mesh, whose columns hold equal shards of the parameters."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from dlion.errors import CheckpointError, ranks_text
from dlion.sharding import check_shards, ranks_of_shards, trained

MESH = "make one mesh on all ranks by init_device_mesh(device, (replicas, shards)), and use both its dimensions"


def ranks_of_worker(param_groups: list[dict[str, Any]], voters: dist.ProcessGroup) -> list[int]:
    """The ranks that hold this worker's shards, one where nothing is sharded; none where that cannot work."""
    params = list(trained(param_groups))
    try:
        shards = ranks_of_shards(params)
        if shards:
            check_shards(params, voters)
    except ValueError:
        return []
    return shards or [voters.rank()]


def ranks_of_mesh(voters: list[int], mine: list[int]) -> list[int]:
    """All ranks of a mesh, of which this one knows those of its column and of its row.

    Raises:
        CheckpointError: the mesh is neither all ranks nor regular.
    """
    me, world = dist.get_rank(), dist.get_world_size()
    if len(voters) * len(mine) == world:
        return list(range(world))
    everyone = sorted({voter + rank - me for voter in voters for rank in mine})
    if len(everyone) < len(voters) * len(mine) or not 0 <= everyone[0] <= everyone[-1] < world:
        raise CheckpointError(
            f"{ranks_text(voters)} vote and {ranks_text(mine)} hold shards, and no regular mesh has both: {MESH}"
        )
    return everyone


def check_seats(seats: Sequence[list[int]], ranks: Sequence[int]) -> None:
    """Raise a CheckpointError where the processes are not all shards of all workers, each once, going by their `seat`s.

    Args:
        seats: of each process [worker, shard, lowest rank that holds the worker's shards, workers, shards].
        ranks: what an error calls them.
    """
    counted, taken, firsts = seats[0][3:], dict[tuple[int, int], int](), dict[int, int]()
    for rank, (worker, shard, first, *counts) in zip(ranks, seats, strict=True):
        if counts != counted:
            raise CheckpointError(
                f"rank {rank} counts {counts[0]} workers of {counts[1]} ranks each and rank {ranks[0]} {counted[0]} of "
                f"{counted[1]}: {MESH}"
            )
        if (worker, shard) in taken:
            raise CheckpointError(
                f"rank {taken[worker, shard]} and rank {rank} both hold shard {shard} of worker {worker}: {MESH}"
            )
        if firsts.setdefault(worker, first) != first:  # torch sorts the ranks of a group, whatever the mesh says
            raise CheckpointError(
                f"rank {rank} votes as worker {worker} and holds shards of another replica than other ranks that do: "
                f"{MESH}"
            )
        taken[worker, shard] = rank
