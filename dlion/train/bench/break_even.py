"""From this run's figures to other bandwidths: a model of two terms, and the bandwidth below which voting pays.

    seconds of a step = local work + max(0, bytes / bandwidth + calls * latency - hidden)

Local work, latency and what can be hidden are measured in this run; bytes are by formula. `hidden` is the backward
pass for whoever exchanges during it, and 0 for others. Left out is what every contender pays beside that: waiting for
slower workers, and for DDP what its overlap costs the computation. So the model is a lower bound for both contenders,
and the break-even may lie on either side of it.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

SAME = 1e-12


@dataclass(frozen=True)
class Terms:
    """What one contender's step is made of.

    Attributes:
        local: seconds of work that no network changes.
        bytes_sent: by each worker in a step.
        delay: seconds of latency in a step: calls times the latency of one.
        hidden: seconds of exchange that the backward pass can hide.
    """

    local: float
    bytes_sent: float
    delay: float
    hidden: float

    def seconds(self, slowness: float) -> float:
        """Of a step, at so many seconds per byte."""
        return self.local + max(0.0, self.bytes_sent * slowness + self.delay - self.hidden)

    @property
    def bends(self) -> float:
        """The slowness from which on the exchange shows."""
        return (self.hidden - self.delay) / self.bytes_sent if self.bytes_sent else 0.0


@dataclass(frozen=True)
class BreakEven:
    """Where voting pays: everywhere, below a bandwidth, or nowhere."""

    pays: Literal["everywhere", "below", "nowhere"]
    mbit_per_s: float | None
    ddp: Terms
    dlion: Terms

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def break_even(ddp: Terms, dlion: Terms) -> BreakEven:
    """Compare two contenders over all bandwidths. `mbit_per_s` is the highest one below which dlion is always ahead."""

    def ahead(slowness: float) -> float:
        return ddp.seconds(slowness) - dlion.seconds(slowness)

    corners = [0.0, *sorted(point for one in (ddp, dlion) if (point := one.bends) > 0)]
    end = corners[-1]
    slope = ddp.bytes_sent - dlion.bytes_sent  # from the last corner on
    if slope < 0 or (slope == 0 and ahead(end) <= SAME):
        return BreakEven("nowhere", None, ddp, dlion)
    if ahead(end) < -SAME:
        return _below(end - ahead(end) / slope, ddp, dlion)
    for left, right in reversed(list(pairwise(corners))):
        if ahead(left) < -SAME:
            share = ahead(right) / (ahead(right) - ahead(left))
            return _below(right - share * (right - left), ddp, dlion)
    return BreakEven("everywhere", None, ddp, dlion)


def _below(slowness: float, ddp: Terms, dlion: Terms) -> BreakEven:
    return BreakEven("below", 8e-6 / slowness, ddp, dlion)
