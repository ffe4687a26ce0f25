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
    """

    name: str
    draft: str
    seat: list[int]
    form: list[list[Any]]
    held: list[list[Any]]


def agreed(told: Sequence[Readiness]) -> str:
    """The name of the draft that all write into.

    Raises:
        CheckpointError: they do not write one checkpoint of one state.
    """
    for rank, said in enumerate(told):
        if said.name != told[0].name:
            raise CheckpointError(
                f"rank {rank} saves {said.name!r} and rank 0 {told[0].name!r}: give all workers one path"
            )
    check_seats([said.seat for said in told])
    strange = [rank for rank, said in enumerate(told) if said.form != told[0].form]
    if strange:
        mine, theirs = ({json.dumps(row) for row in told[rank].form} for rank in (0, strange[0]))
        raise CheckpointError(
            f"the state of {ranks_text(strange)} is not that of rank 0 (first difference: {min(mine ^ theirs)}): save "
            "between steps, on all workers"
        )
    return next((said.draft for said in told if said.draft), "")


def held_before(told: Sequence[Readiness], rank: int) -> set[str]:
    """The keys of chunks that `rank` holds and a lower rank too, which writes them."""
    lower = {(key, *offset) for said in told[:rank] for key, offset in said.held}
    return {key for key, offset in told[rank].held if (key, *offset) in lower}
