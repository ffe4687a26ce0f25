"""Hyper-parameters on the device: read there where they lie there, and compared by a fingerprint made there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlion import agreement
from dlion.header import NOBODY
from dlion.layout import local, named
from dlion.ops.bits import mix64

APPLIED = ("lr", "weight_decay")  # may be tensors that change without a word to the host


def scalars(
    param_groups: list[dict[str, Any]], keys: Sequence[str], device: torch.device
) -> tuple[list[dict[str, Any]], Tensor]:
    """The values of `keys` in each group now, and their fingerprint of 32 bits, i64[].

    lr and weight decay are f64[] on the device, copies: what the optimizer's are later is another matter. The others
    are plain, and a tensor among them is read.
    """
    plain = agreement.hyper_parameters(param_groups, [key for key in keys if key not in APPLIED])
    values = torch.zeros(len(param_groups), len(APPLIED), dtype=torch.float64, device=device)
    for row, group in zip(values, param_groups, strict=True):
        for place, name in zip(row, APPLIED, strict=True):
            value = group[name]
            if isinstance(value, Tensor) and value.device == device:
                place.copy_(value.detach().reshape(()))
            else:
                place.fill_(float(value))
    bits = values.view(torch.int64)
    places = torch.arange(bits.numel(), device=device).view(bits.shape)
    found = [
        {key: told[key] if key in told else row[APPLIED.index(key)] for key in sorted(keys)}
        for told, row in zip(plain, values, strict=True)
    ]
    return found, mix64(agreement.hyper_fingerprint(plain), bits, places).sum() & NOBODY


def first_not_finite(param_groups: list[dict[str, Any]], device: torch.device) -> Tensor:
    """The place, among all parameters, of the first whose gradient holds an infinity or NaN, i64[]; -1 without one."""
    place = torch.full((), -1, dtype=torch.int64, device=device)
    for number, (_, _, _, param) in reversed(list(enumerate(named(param_groups)))):
        if param.grad is not None:
            place = place.masked_fill(~local(param.grad).isfinite().all(), number)
    return place
