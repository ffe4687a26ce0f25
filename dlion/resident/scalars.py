"""Hyper-parameters on the device: read there where they lie there, and compared by a fingerprint.

Plain ones are sent once, with their fingerprint, and kept: a step that changes none of them starts nothing.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlion import agreement
from dlion.codecs import Moment
from dlion.header import NOBODY
from dlion.layout import local, named
from dlion.ops.bits import mix64, mixed
from dlion.ops.kept import Kept, Shelf, sent

APPLIED = ("lr", "weight_decay")  # may be tensors that change without a word to the host


@dataclass(frozen=True)
class Scalars:
    """The hyper-parameters of a step.

    Attributes:
        hypers: of each group; lr and weight decay are f64[] on the device.
        applied: f64[groups, 2] on the device, all of these.
        fingerprint: of all hyper-parameters, 32 bits, i64[] on the device.
        given: of each group lr and weight decay, a plain number where it was one.
    """

    hypers: list[dict[str, Any]]
    applied: Tensor
    fingerprint: Tensor
    given: list[dict[str, Any]]


@dataclass(frozen=True)
class ResidentMoment(Moment):
    """When and by which `Scalars.applied` a step is taken on the device."""

    applied: Any = None


_plain: Shelf[Kept] = Shelf(64)


def scalars(param_groups: list[dict[str, Any]], keys: Sequence[str], device: torch.device) -> Scalars:
    """The values of `keys` in each group now.

    lr and weight decay are copies: what the optimizer's are later is another matter. The others are plain, and a tensor
    among them is read.
    """
    plain = agreement.hyper_parameters(param_groups, [key for key in keys if key not in APPLIED])
    given = [group[name] for group in param_groups for name in APPLIED]
    there = [isinstance(value, Tensor) and value.device == device for value in given]
    said = agreement.hyper_fingerprint(plain)
    numbers = [0.0 if is_there else float(value) for value, is_there in zip(given, there, strict=True)]
    applied, fingerprint = _kept(said, numbers, device)
    if any(there):
        applied = applied.clone()
        for place, value, is_there in zip(applied, given, there, strict=True):
            if is_there:
                place.copy_(value.detach().reshape(()))
        fingerprint = _fingerprint(said, applied.view(torch.int64))
    values = [one if is_there else number for one, number, is_there in zip(applied, numbers, there, strict=True)]
    again = [dict(zip(APPLIED, pair, strict=True)) for pair in zip(values[::2], values[1::2], strict=True)]
    applied = applied.view(-1, len(APPLIED))
    found = [
        {key: told[key] if key in told else row[APPLIED.index(key)] for key in sorted(keys)}
        for told, row in zip(plain, applied, strict=True)
    ]
    return Scalars(found, applied, fingerprint, again)


def _kept(said: int, numbers: Sequence[float], device: torch.device) -> tuple[Tensor, ...]:
    """The numbers, f64[n], and the fingerprint of them and of what else was `said`, i64[]."""
    patterns = struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers))

    def made() -> Kept:
        total = sum(int(mixed(said, pattern, place)) for place, pattern in enumerate(patterns))
        table = sent((*patterns, total & NOBODY), torch.int64, device)
        return Kept(device, table[:-1].view(torch.float64), table[-1])

    return _plain.get((said, patterns, device), device, made).here()


def _fingerprint(said: int, patterns: Tensor) -> Tensor:
    """Likewise of numbers that lie on the device, by their bits, i64[n]."""
    places = torch.arange(len(patterns), device=patterns.device)
    return mix64(said, patterns, places).sum() & NOBODY


def first_not_finite(param_groups: list[dict[str, Any]], device: torch.device) -> Tensor:
    """The place, among all parameters, of the first whose gradient holds an infinity or NaN, i64[]; -1 without one."""
    place = torch.full((), -1, dtype=torch.int64, device=device)
    for number, (_, _, _, param) in reversed(list(enumerate(named(param_groups)))):
        if param.grad is not None:
            place = place.masked_fill(~local(param.grad).isfinite().all(), number)
    return place
