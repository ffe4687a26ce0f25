"""Gradient scalers: a step under one takes this worker's scale out of its gradients, or rests where they overflowed.

torch.amp.GradScaler, and ShardedGradScaler with it, skips `step()` on a worker whose gradients are not finite, and the
others would wait for it. Of an optimizer with `_step_supports_amp_scaling` it calls `step()` in any case, and says what
it found by two attributes that exist during that call: `found_inf`, and `grad_scale`, which is None where
`scaler.unscale_(optimizer)` has unscaled already.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dlion.errors import OverlapError
from dlion.layout import local


def is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a gradient scaler called the step that is under way."""
    return hasattr(optimizer, "found_inf")


def refuse_overlap(optimizer: torch.optim.Optimizer) -> None:
    """Raise OverlapError under a gradient scaler: during backward nobody knows yet whether gradients overflow."""
    if is_scaled(optimizer):
        raise OverlapError(
            "a gradient scaler called step() with overlap=True, and ballots left during backward with gradients that "
            "were still scaled: use overlap=False with a gradient scaler, or bfloat16, which needs none"
        )


@contextmanager
def scale_of_a_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around a step: a scaler takes back what it gave only where the step returns, and would multiply by it again."""
    try:
        yield
    except BaseException:
        for name in ("found_inf", "grad_scale"):
            if hasattr(optimizer, name):
                delattr(optimizer, name)
        raise


def unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """As `unscale`, and wait for it: whether this worker's gradients may vote."""
    overflowed = unscale(optimizer)
    return overflowed is None or not bool(overflowed)


def unscale(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Take this worker's scale out of its gradients, in place; nothing to do without a scaler, or after `unscale_`.

    Returns:
        bool[], where the scaler's numbers are: whether there is an infinity or NaN among them; they then stay as they
        are. None without a scaler, or without gradients.
    """
    if not is_scaled(optimizer):
        return None
    found: Any = optimizer.found_inf  # type: ignore[attr-defined]
    if not isinstance(found, Tensor):  # no parameter has a gradient
        return None
    scale: Tensor | None = optimizer.grad_scale  # type: ignore[attr-defined]
    overflowed: Tensor = found.reshape(()) > 0
    if scale is not None:
        inverse = scale.double().reciprocal().float().reshape(())  # as GradScaler.unscale_ has it, to the bit
        inverse = inverse.masked_fill(overflowed.to(scale.device), 1.0)
        grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
        _multiply([local(grad) for grad in grads if grad is not None], inverse)
    return overflowed


def _multiply(grads: list[Tensor], factor: Tensor) -> None:
    """f[...] of any devices by f32[]: each product is rounded once."""
    there = {device: factor.to(device) for device in {grad.device for grad in grads}}
    for grad in grads:
        if grad.dtype in (torch.bfloat16, torch.float16):  # torch would round the factor first
            grad.copy_(grad.float() * there[grad.device])
        else:
            grad.mul_(there[grad.device])
