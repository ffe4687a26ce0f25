"""What processes tell each other before they write: is it one checkpoint, and who writes what several hold?"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from dlion.checkpoint.mesh import check_seats
from dlion.errors import CheckpointError, ranks_text


class Readiness(NamedTuple):
    """What one process says, in JSON.

    Attributes:
        name: of the checkpoint. draft: of the folder in which it is written, of who leads; "" of others.
        seat: which shard of which worker it is, and how many there are.
        form: what must be equal on all: facts, and key, shape and dtype of whole tensors.
        held: key and offset of the chunks that others may hold too.
        common: key, offset and checksum of what all workers share.
    """

    name: str
    draft: str
    seat: list[int]
    form: list[list[Any]]
    held: list[list[Any]]
    common: list[list[Any]]


def agreed(told: Sequence[Readiness], ranks: Sequence[int]) -> str:
    """The name of the draft that all write into. `ranks`: what an error calls those who told.

    Raises:
        CheckpointError: they do not write one checkpoint of one state.
    """
    for rank, said in zip(ranks, told, strict=True):
        if said.name != told[0].name:
            raise CheckpointError(
                f"rank {rank} saves {said.name!r} and rank {ranks[0]} {told[0].name!r}: give all workers one path"
            )
    check_seats([said.seat for said in told], ranks)
    strange = [k for k, said in enumerate(told) if said.form != told[0].form]
    if strange:
        mine, theirs = ({json.dumps(row) for row in told[k].form} for k in (0, strange[0]))
        raise CheckpointError(
            f"the state of {ranks_text([ranks[k] for k in strange])} is not that of rank {ranks[0]} (first difference: "
            f"{min(mine ^ theirs)}): save between steps, on all workers"
        )
    _check_replicas(told, ranks)
    return next((said.draft for said in told if said.draft), "")


def _check_replicas(told: Sequence[Readiness], ranks: Sequence[int]) -> None:
    """What one process writes for all must be what all have."""
    seen: dict[tuple[Any, ...], tuple[int, int]] = {}
    for rank, said in zip(ranks, told, strict=True):
        for key, offset, value in said.common:
            first, there = seen.setdefault((key, *offset), (rank, value))
            if value != there:
                raise CheckpointError(
                    f"{key.partition('/')[2]} on rank {rank} is not that of rank {first}, so one copy cannot stand for "
                    "all replicas: look for code that changes parameters or state on some workers alone, and start "
                    "again from the last checkpoint"
                )


def held_before(told: Sequence[Readiness], number: int) -> set[str]:
    """The keys of chunks that process `number` holds and one before it too, which writes them."""
    lower = {(key, *offset) for said in told[:number] for key, offset in said.held}
    return {key for key, offset in told[number].held if (key, *offset) in lower}
