"""What a ledger holds on the device, and how a step writes it: `dlion.resident.ledger` keeps it.

Entries are an i64[n] in the order of `Entries`, modified in place.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dlion.header import Status
from dlion.resident import headers


class Entries(NamedTuple):
    """A ledger as the host reads it.

    Attributes:
        t: verdicts applied. steps, skipped, abstentions: what `dlion.Stats` counts, since the ledger was begun.
        repeated: steps that graphs took, refused ones as well.
        status, offender: of the first verdict header that nobody may apply; OK and NOBODY without one.
        slot: the first parameter whose gradient here was not finite then, -1 without or where nobody looked.
        changed: the first whose gradient here was not the one that was voted with, likewise.
        began: t when the step at hand began.
        moved, skips, raises: 1 where the step at hand has a verdict to apply, a header that says SKIP or RAISE; else 0.
    """

    t: int
    steps: int
    skipped: int
    abstentions: int
    repeated: int
    status: int
    offender: int
    slot: int
    changed: int
    began: int
    moved: int
    skips: int
    raises: int


OF_A_STEP = 3  # entries at the end, 0 when a step begins


def enter(entries: Tensor, rows: Tensor, workers: int) -> Tensor:
    """Write down what follows from a bucket's verdict headers, i64[owners, 2].

    Returns:
        How many voters' verdict may be applied, i64[]; 0 for nobody's.
    """
    header = headers.worst(rows, workers)
    status = headers.status_of(header)
    refuse(entries, status >= Status.HYPERPARAMETERS_DIFFER, status, headers.offender_of(header))
    found = by_name(entries)
    well = is_well(entries)
    voters = headers.voters_of(header) * well
    found["abstentions"].add_(headers.abstentions_of(header) * well)
    said = {"moved": voters > 0, "skips": status == Status.SKIP, "raises": status == Status.RAISE}
    for name, when in said.items():
        found[name].bitwise_or_(when.long())
    return voters


def refuse(
    entries: Tensor, when: Tensor, status: Tensor | int, offender: Tensor | int, slot: Tensor | int = -1
) -> None:
    """Let no step be applied from now on, where bool[] `when` says so and none was refused before."""
    found = by_name(entries)
    first = when & is_well(entries)
    for name, value in {"offender": offender, "slot": slot, "status": status}.items():
        there = value if isinstance(value, Tensor) else torch.full_like(found[name], value)
        found[name].copy_(torch.where(first, there, found[name]))


def close(entries: Tensor) -> None:
    """The step is over: count it if it was not refused."""
    found = by_name(entries)
    well = is_well(entries).long()
    moved = found["moved"] * well
    found["t"].add_(moved)
    found["steps"].add_(well)
    found["skipped"].add_(well - moved)


def is_well(entries: Tensor) -> Tensor:
    """Whether no step was refused so far, bool[]."""
    well: Tensor = by_name(entries)["status"] == Status.OK
    return well


def by_name(entries: Tensor) -> dict[str, Tensor]:
    """Each entry, i64[], where it lies."""
    return dict(zip(Entries._fields, entries.unbind(), strict=True))
