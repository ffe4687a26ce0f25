"""What steps write down on the device, for the host to read when it has time: t, counts, and what went wrong."""

from typing import NamedTuple

import torch
from torch import Tensor

from dlion.copies import Copy
from dlion.header import NOBODY, Status
from dlion.resident import headers


class Entries(NamedTuple):
    """A ledger as the host reads it.

    Attributes:
        t: verdicts applied. steps, skipped, abstentions: what `dlion.Stats` counts, since the ledger was begun.
        repeated: steps that graphs took, refused ones as well.
        status, offender: of the first verdict header that nobody may apply; OK and NOBODY without one.
        slot: the first parameter whose gradient here was not finite then, -1 without or where nobody looked.
        changed: the first whose gradient here was not the one that was voted with, likewise.
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


class Ledger:
    """One optimizer's steps, as they are known on the device.

    Trouble stays: after it no step writes parameters, until the host has heard of it and calls `forgive`.

    Attributes:
        t: i64[], verdicts applied; it is written in place.
        well: bool[], whether no step was refused so far.
    """

    def __init__(self, t: int, device: torch.device) -> None:
        self._entries = torch.zeros(len(Entries._fields), dtype=torch.int64, device=device)
        self.t, self._steps, self._skipped, self._abstentions, self._repeated, *trouble = self._entries
        self._status, self._offender, self._slot, self._changed = trouble
        self.t.fill_(t)
        self.forgive()
        self._copy = Copy.of(self._entries)
        self._moved = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def well(self) -> Tensor:
        well: Tensor = self._status == Status.OK
        return well

    def begin(self) -> None:
        """A step begins, whatever became of the one before."""
        self._moved.zero_()

    def enter(self, header: Tensor) -> Tensor:
        """Write down a verdict's header, i64[2]; how many voters' verdict may be applied, i64[], 0 for nobody's."""
        status = headers.status_of(header)
        self.refuse(status >= Status.HYPERPARAMETERS_DIFFER, status, headers.offender_of(header))
        well = self.well
        self._abstentions.add_(headers.abstentions_of(header) * well)
        return headers.voters_of(header) * well

    def refuse(self, when: Tensor, status: Tensor | int, offender: Tensor | int, slot: Tensor | int = -1) -> None:
        """Let no step be applied from now on, where bool[] `when` says so and none was refused before."""
        first = when & self.well
        for entry, value in ((self._offender, offender), (self._slot, slot), (self._status, status)):
            there = value if isinstance(value, Tensor) else torch.full_like(entry, value)
            entry.copy_(torch.where(first, there, entry))

    def accuse(self, slot: Tensor) -> None:
        """The gradient of this parameter, i64[], is not the one that was voted with; -1: of none."""
        self._changed.copy_(torch.where(self._changed < 0, slot, self._changed))

    def apply(self, voters: Tensor) -> Tensor:
        """A verdict of so many voters, i64[], is applied; the same number."""
        self._moved.logical_or_(voters > 0)
        return voters

    def close(self) -> None:
        """The step is over: count it if it was not refused."""
        well = self.well
        self.t.add_(self._moved & well)
        self._steps.add_(well)
        self._skipped.add_(well & ~self._moved)

    def repeat(self) -> None:
        """What was started belongs to a graph, and is one of its steps whenever it runs."""
        self._repeated.add_(1)

    def send(self) -> None:
        """Let the device copy the entries to where `heard` finds them."""
        self._copy = Copy.of(self._entries)

    def heard(self) -> Entries:
        """The entries as they were sent the last time; it waits for the device to have come so far, and no further."""
        return Entries(*self._copy.heard())

    def now(self) -> Entries:
        """The entries as all steps that were started leave them; it waits for the device."""
        return Entries(*self._entries.tolist())

    def forgive(self) -> None:
        """What went wrong is known: steps are applied again."""
        self._status.fill_(Status.OK)
        self._offender.fill_(NOBODY)
        self._slot.fill_(-1)
        self._changed.fill_(-1)
