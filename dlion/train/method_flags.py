"""The flags of `dlion train` that only some methods have; which ones do is known to `dlion.Distributed`."""

from dataclasses import dataclass
from typing import Any, Literal

FIXED = "fixed"


@dataclass(frozen=True, kw_only=True)
class MethodFlags:
    """What a method is told beside learning rate, betas and weight decay. None: its own default."""

    ties: Literal["rotate", "alternate", "zero", "fixed"] | None = None
    """What an even majority does: rotate unless given; zero needs --zeros exact, fixed (always +1) needs --simulate."""
    zeros: Literal["balanced", "exact"] = "balanced"
    """What a worker says where its update is exactly zero; exact takes two bits on the wire. Of the votes."""
    keep: float | None = None
    """Share of the gradient's entries that is sent. Of graddrop and dgc."""
    momentum: float | None = None
    """Momentum of the methods that have one number for it."""

    @property
    def settings(self) -> dict[str, Any]:
        """The method's own hyper-parameters that were given."""
        given = {"keep": self.keep, "momentum": self.momentum}
        return {name: value for name, value in given.items() if value is not None}
