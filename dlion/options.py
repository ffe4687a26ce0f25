"""What a user chooses for an optimizer, checked at once: every error says what was given and what is allowed."""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor

from dlion.layout import FLOATS, named
from dlion.methods import METHODS
from dlion.tallies import TIES

TOPOLOGIES = ("auto", "sharded", "replicated", "server")
ZEROS = ("balanced", "exact")
NONFINITE = ("abstain", "skip", "raise")


@dataclass(frozen=True)
class Options:
    """What must be equal on all workers, and how long to wait for them."""

    method: str
    topology: str
    ties: str
    zeros: str
    nonfinite: str
    bucket_bytes: int
    timeout: timedelta | None

    @staticmethod
    def checked(
        method: str,
        topology: str,
        ties: str | None,
        zeros: str,
        nonfinite: str,
        bucket_bytes: int,
        timeout: float | timedelta | None,
    ) -> "Options":
        """The options, or a ValueError for the first that is out of range."""
        one_of("method", method, tuple(METHODS))
        one_of("topology", topology, TOPOLOGIES)
        one_of("zeros", zeros, ZEROS)
        one_of("nonfinite", nonfinite, NONFINITE)
        if not METHODS[method].votes and (topology != "auto" or zeros != "balanced"):
            raise ValueError(
                f"method={method!r} exchanges full precision, so leave topology and zeros at their defaults"
            )
        if not isinstance(bucket_bytes, int) or bucket_bytes < 8 or bucket_bytes % 8:
            raise ValueError(f"bucket_bytes={bucket_bytes!r} must be a positive multiple of 8 (one word)")
        ties = _checked_ties(method, ties, zeros)
        return Options(method, topology, ties, zeros, nonfinite, bucket_bytes, _checked_timeout(timeout))

    def agreed(self, workers: int) -> dict[str, Any]:
        """The part that every worker must share."""
        names = ("method", "topology", "ties", "zeros", "nonfinite", "bucket_bytes")
        return {name: getattr(self, name) for name in names} | {"workers": workers}


def one_of(name: str, given: Any, allowed: tuple[str, ...]) -> str:
    """The given value, or a ValueError that lists the allowed ones."""
    if given not in allowed:
        raise ValueError(f"{name}={given!r} is not known: choose one of {', '.join(allowed)}")
    return str(given)


def check_group(group: dict[str, Any]) -> None:
    """Raise a ValueError for hyper-parameters out of range or parameters that cannot be trained so."""
    lr, betas, decay = group["lr"], group["betas"], group["weight_decay"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of {lr.numel()} elements: give a number or a tensor of one element")
    if not 0 <= float(lr) < math.inf:
        raise ValueError(f"lr={float(lr)} must be a finite number, 0 or greater")
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ValueError(f"betas={betas} must be two numbers, each at least 0 and below 1")
    if not 0 <= float(decay) < math.inf:
        raise ValueError(f"weight_decay={decay} must be a finite number, 0 or greater")
    for _, _, name, param in named([group]):
        if param.requires_grad and param.dtype not in FLOATS:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise ValueError(
                f"{name} is {str(param.dtype).removeprefix('torch.')}: trainable parameters must be {kinds}"
            )
        if param.is_sparse:
            raise ValueError(f"{name} is sparse: votes need dense parameters")


def _checked_ties(method: str, ties: str | None, zeros: str) -> str:
    if not METHODS[method].breaks_ties:
        if ties is not None:
            raise ValueError(
                f"ties={ties!r} has no meaning with method={method!r}, which has no majority: leave it out"
            )
        return "rotate"
    one_of("ties", ties or "rotate", TIES)
    if ties == "zero" and zeros != "exact":
        raise ValueError("ties='zero' needs zeros='exact': one bit cannot say that nothing moves")
    return ties or "rotate"


def _checked_timeout(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        seconds = timeout.total_seconds() if timeout is not None else 1.0
    else:
        seconds = float(timeout)
    if not 0 < seconds < math.inf:
        raise ValueError(f"timeout={timeout} must be a positive number of seconds, a timedelta or None")
    return timedelta(seconds=seconds) if timeout is not None else None
