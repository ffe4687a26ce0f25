"""Answers of other workers that are heard a step later, so that nobody waits for the device."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlion.asking import Then, told_to_all
from dlion.channel import Channel
from dlion.stats import Stats


@dataclass
class Copy:
    """What the device copies to the host by itself."""

    values: Tensor
    written: torch.Event | None

    @staticmethod
    def of(values: Tensor) -> "Copy":
        """Begin to copy; `values` may change afterwards."""
        on_device = values.device.type != "cpu"
        there = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=on_device)
        there.copy_(values, non_blocking=True)
        written = torch.Event(values.device) if on_device else None
        if written is not None:
            written.record()
        return Copy(there, written)

    def heard(self) -> list[Any]:
        """The values; it waits for the device to have come so far, and no further."""
        if self.written is not None:
            self.written.synchronize()
        return self.values.tolist()


@dataclass
class Later:
    """A `dlion.asking.Ask` whose answers are heard when `deliver` is called; all workers call it in the same order."""

    _asked: list[tuple[Copy, Then]] = field(default_factory=list)

    def __call__(self, channel: Channel | None, phase: str, numbers: Tensor, stats: Stats, then: Then) -> None:
        self._asked.append((Copy.of(told_to_all(channel, phase, numbers, stats)), then))

    def deliver(self) -> None:
        """Hear all answers so far; what is done with one may be a collective call, and may raise."""
        asked, self._asked = self._asked, []
        for copy, then in asked:
            then(copy.heard())
