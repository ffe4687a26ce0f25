"""What a user chooses for an optimizer, checked at once: every error says what was given and what is allowed."""

import math
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from dlion.layout import FLOATS, named
from dlion.methods import METHODS
from dlion.quoting import shown
from dlion.settings import LARGEST, MOST_BUCKET_BYTES, check_values, whole
from dlion.sharding import FSDP1
from dlion.tallies import TIES
from dlion.topology import TOPOLOGIES

ZEROS = ("balanced", "exact")
NONFINITE = ("abstain", "skip", "raise")
ON_MISMATCH = ("raise", "repair")
ROUNDINGS = ("stochastic", "nearest")
BUCKET_BYTES = 2**20
OVERLAP_BYTES = 2**17  # a million parameters; smaller ones begin earlier, but each call costs a few wake-ups (measured)
# where steps are taken on an accelerator: each bucket costs the host the same time, however short the device's is
DEVICE_BUCKET_BYTES, DEVICE_OVERLAP_BYTES = 2**25, 2**21
WHOLE_MODEL = 2**62  # the bucket of methods that have one ballot for all parameters
LONGEST_TIMEOUT = 1e9  # seconds, 30 years: beyond it the network library's clocks overflow


@dataclass(frozen=True)
class Options:
    """What must be equal on all workers, and how long to wait for them."""

    method: str
    topology: str
    ties: str
    zeros: str
    nonfinite: str
    rounding: str
    momentum_dtype: torch.dtype | None
    bucket_bytes: int
    overlap: bool
    timeout: timedelta | None
    verify_every: int
    on_mismatch: str
    device_bucket_bytes: int

    @staticmethod
    def checked(
        method: str,
        topology: str,
        ties: str | None,
        zeros: str,
        nonfinite: str,
        rounding: str | None,
        momentum_dtype: torch.dtype | None,
        bucket_bytes: int | None,
        overlap: bool,
        timeout: float | timedelta | None,
        verify_every: int | None,
        on_mismatch: str,
    ) -> "Options":
        """The options, or a ValueError for the first that is out of range."""
        one_of("method", method, tuple(METHODS))
        one_of("topology", topology, TOPOLOGIES)
        one_of("zeros", zeros, ZEROS)
        one_of("nonfinite", nonfinite, NONFINITE)
        _check_topology(method, topology)
        if "zeros" not in METHODS[method].options and zeros != "balanced":
            raise ValueError(
                f"zeros={shown(zeros)} has no meaning with method={method!r}, whose ballots are no votes: leave it out"
            )
        _check_overlap(method, overlap)
        device_bucket = bucket_bytes or (DEVICE_OVERLAP_BYTES if overlap else DEVICE_BUCKET_BYTES)
        bucket_bytes = _checked_bucket(method, bucket_bytes, overlap)
        ties = _checked_ties(method, ties, zeros)
        rounding = _checked_rounding(method, rounding)
        _check_momentum_dtype(method, momentum_dtype)
        waits = checked_timeout(timeout)
        every = _checked_verification(verify_every)
        one_of("on_mismatch", on_mismatch, ON_MISMATCH)
        votes = (method, topology, ties, zeros, nonfinite, rounding, momentum_dtype, bucket_bytes, overlap)
        return Options(*votes, waits, every, on_mismatch, device_bucket)

    def bucket_on(self, device: torch.device) -> int:
        """Bytes of one-bit ballots that travel together where parameters lie there, of methods with fused votes."""
        return self.bucket_bytes if device.type == "cpu" else self.device_bucket_bytes

    def agreed(self, workers: int) -> dict[str, Any]:
        """The part that every worker must share.

        The dtype of momenta is in it although votes need no equal momenta: g-lion does, and a worker whose memory or
        noise is not the others' is a mistake far more often than a plan.
        """
        votes = ("method", "topology", "ties", "zeros", "nonfinite", "rounding", "bucket_bytes", "overlap")
        names = (*votes, "verify_every", "on_mismatch")
        momentum = str(self.momentum_dtype).removeprefix("torch.")
        return {name: getattr(self, name) for name in names} | {"momentum_dtype": momentum, "workers": workers}


def one_of(name: str, given: Any, allowed: tuple[str, ...]) -> str:
    """The given value, or a ValueError that lists the allowed ones."""
    if given not in allowed:
        raise ValueError(f"{name}={shown(given)} is not known: choose one of {', '.join(allowed)}")
    return str(given)


def check_group(group: dict[str, Any]) -> None:
    """Raise a ValueError for hyper-parameters out of range or parameters that cannot be trained so."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of {lr.numel()} elements: give a number or a tensor of one element")
    for name in ("lr", "weight_decay"):
        if not (_is_number(group[name]) and 0 <= float(group[name]) < math.inf):
            raise ValueError(f"{name}={shown(group[name])} must be a finite number, 0 or greater")
    if "betas" in group:
        betas = group["betas"]
        pair = betas if isinstance(betas, (tuple, list)) else ()
        if len(pair) != 2 or not all(_is_number(beta) and 0 <= float(beta) < 1 for beta in pair):
            raise ValueError(f"betas={shown(betas)} must be two numbers, each at least 0 and below 1")
    check_values(group)
    if not isinstance(group["maximize"], bool):
        raise ValueError(f"maximize={shown(group['maximize'])} must be True or False")
    check_parameters(group)


def check_parameters(group: dict[str, Any]) -> None:
    """Raise a ValueError for parameters that cannot be trained by votes."""
    for _, _, name, param in named([group]):
        if param.requires_grad and param.dtype not in FLOATS:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
            raise ValueError(
                f"{name} is {str(param.dtype).removeprefix('torch.')}: trainable parameters must be {kinds}"
            )
        if getattr(param, "_is_flat_param", False):  # how FSDP1, which is slow to import, knows them itself
            raise ValueError(f"{name} is a flat parameter: {FSDP1}")
        if param.is_sparse:
            raise ValueError(f"{name} is sparse: votes need dense parameters")


def _check_topology(method: str, topology: str) -> None:
    allowed = METHODS[method].topologies
    if topology not in allowed:
        raise ValueError(
            f"topology={topology!r} has no meaning with method={method!r}, whose ballots nobody can count in parts: "
            f"choose one of {', '.join(allowed)}"
        )


def _check_overlap(method: str, overlap: Any) -> None:
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap={shown(overlap)} must be True or False")
    if overlap and "overlap" not in METHODS[method].options:
        raise ValueError(
            f"overlap=True has no meaning with method={method!r}, which needs all gradients before its first ballot "
            "can leave: leave it out"
        )


def _checked_bucket(method: str, given: Any, overlap: bool) -> int:
    if "bucket_bytes" not in METHODS[method].options:
        if given is not None:
            raise ValueError(
                f"bucket_bytes={shown(given)} has no meaning with method={method!r}, which has one ballot for the "
                "whole model: leave it out"
            )
        return WHOLE_MODEL
    if given is None:
        return OVERLAP_BYTES if overlap and "zeros" in METHODS[method].options else BUCKET_BYTES
    if not isinstance(given, int) or not 8 <= given <= MOST_BUCKET_BYTES or given % 8:
        raise ValueError(
            f"bucket_bytes={shown(given)} must be a positive multiple of 8 (one word), at most {MOST_BUCKET_BYTES:,}"
        )
    return given


def _checked_ties(method: str, ties: str | None, zeros: str) -> str:
    if "ties" not in METHODS[method].options:
        if ties is not None:
            raise ValueError(
                f"ties={shown(ties)} has no meaning with method={method!r}, which has no majority: leave it out"
            )
        return "rotate"
    one_of("ties", ties or "rotate", TIES)
    if ties == "zero" and zeros != "exact":
        raise ValueError("ties='zero' needs zeros='exact': one bit cannot say that nothing moves")
    return ties or "rotate"


def check_process_group(group: Any) -> None:
    """Raise a ValueError for what is no process group, or is one without this worker."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"process_group={group!r}: this worker is not a member of the group: build the optimizer on members only"
        )
    raise ValueError(
        f"process_group={shown(group)} must be a torch.distributed ProcessGroup, or None for the default one"
    )


def _checked_rounding(method: str, rounding: str | None) -> str:
    if "rounding" not in METHODS[method].options:
        if rounding is not None:
            raise ValueError(
                f"rounding={shown(rounding)} has no meaning with method={method!r}, which rounds to nearest: "
                "leave it out"
            )
        return "nearest"
    return one_of("rounding", rounding or "stochastic", ROUNDINGS)


def _check_momentum_dtype(method: str, dtype: Any) -> None:
    if dtype is None:
        return
    if "momentum_dtype" not in METHODS[method].options:
        raise ValueError(
            f"momentum_dtype={shown(dtype)} has no meaning with method={method!r}: torch's optimizer makes its own "
            "state: leave it out"
        )
    if dtype != torch.bfloat16:
        raise ValueError(
            f"momentum_dtype={shown(dtype)} must be torch.bfloat16, or None for float32 (float64 for float64 "
            "parameters)"
        )


def checked_timeout(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, Tensor) or not _is_number(seconds) or not 0.001 <= seconds <= LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout={shown(timeout)} must be a positive number of seconds (0.001 to {LONGEST_TIMEOUT:.0e}), a "
            "timedelta or None"
        )
    return timedelta(seconds=float(seconds))


def _checked_verification(every: Any) -> int:
    if every is None:
        return 0
    if not whole(every, 0):
        raise ValueError(
            f"verify_every={shown(every)} must be a number of steps, at most {LARGEST:,}, or 0 or None for never"
        )
    return int(every)


def _is_number(value: Any) -> bool:
    """Whether float() means the value itself: text is not a number here, nor are True and False."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, SupportsFloat)
