"""Answers of other workers that are heard a step later, so that nobody waits for the device."""

from dataclasses import dataclass, field

from torch import Tensor

from dlion.asking import Then, told_to_all
from dlion.channel import Channel
from dlion.copies import Copy
from dlion.stats import Stats


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
