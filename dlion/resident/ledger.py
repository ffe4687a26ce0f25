"""What steps write down on the device, for the host to read when it has time: t, counts, and what went wrong."""

from types import ModuleType

import torch
from torch import Tensor

from dlion.copies import Copy
from dlion.header import NOBODY, Status
from dlion.resident.entries import OF_A_STEP, Entries, by_name, is_well, refuse


class Ledger:
    """One optimizer's steps, as they are known on the device.

    Trouble stays: after it no step writes parameters, until the host has heard of it and calls `forgive`.

    Args:
        kernels: as `choice.kernels_for` gives them.

    Attributes:
        t: i64[], verdicts applied; it is written in place.
    """

    def __init__(self, t: int, device: torch.device, kernels: ModuleType) -> None:
        self._kernels = kernels
        self._entries = torch.zeros(len(Entries._fields), dtype=torch.int64, device=device)
        self._named = by_name(self._entries)
        self._of_step = self._entries[-OF_A_STEP:]
        self.t = self._named["t"]
        self.t.fill_(t)
        self.forgive()
        self._copy = Copy.of(self._entries)

    def begin(self) -> None:
        """A step begins, whatever became of the one before."""
        self._of_step.zero_()
        self._named["began"].copy_(self.t)

    def enter(self, headers: Tensor, workers: int) -> Tensor:
        """Write down a bucket's verdict headers, i64[owners, 2], of so many workers.

        Returns:
            How many voters' verdict may be applied, i64[], 0 for nobody's.
        """
        voters: Tensor = self._kernels.enter(self._entries, headers, workers)
        return voters

    def forbid(self, slot: Tensor | None) -> Tensor:
        """Where one bucket decides for all of a step, and all are entered: whether they may be applied, bool[].

        Args:
            slot: with nonfinite="raise", the first parameter here whose gradient is not finite, i64[]; -1 without one.
        """
        if slot is not None:
            refuse(self._entries, self._named["raises"] > 0, Status.RAISE, NOBODY, slot)
        go: Tensor = is_well(self._entries) & (self._named["skips"] == 0)
        self._named["moved"].mul_(go)
        return go

    def accuse(self, slot: Tensor) -> None:
        """The gradient of this parameter, i64[], is not the one that was voted with; -1: of none."""
        changed = self._named["changed"]
        changed.copy_(torch.where(changed < 0, slot, changed))

    def acquit(self) -> None:
        """The gradient that was not the one voted with is known."""
        self._named["changed"].fill_(-1)

    def close(self) -> None:
        """The step is over: count it if it was not refused."""
        self._kernels.close(self._entries)

    def repeat(self) -> None:
        """What was started belongs to a graph, and is one of its steps whenever it runs."""
        self._named["repeated"].add_(1)

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
        nothing = {"status": Status.OK, "offender": NOBODY, "slot": -1, "changed": -1}
        for name, value in nothing.items():
            self._named[name].fill_(value)
