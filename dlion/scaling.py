"""Gradient scalers: a step under one takes this worker's scale out of its gradients, or rests where they overflowed.

torch.amp.GradScaler, and ShardedGradScaler with it, skips `step()` on a worker whose gradients are not finite, and the
others would wait for it. Of an optimizer with `_step_supports_amp_scaling` it calls `step()` in any case, and says what
it found by two attributes that exist during that call: `found_inf`, and `grad_scale`, which is None where
`scaler.unscale_(optimizer)` has unscaled already.
"""

from typing import Any

import torch

from dlion.errors import OverlapError


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


def unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """Take this worker's scale out of its gradients, in place; nothing to do without a scaler, or after `unscale_`.

    Returns:
        Whether they may vote: False where the scaler found an infinity or NaN among them; they then stay as they are.
    """
    if not is_scaled(optimizer):
        return True
    found: Any = optimizer.found_inf  # type: ignore[attr-defined]
    scale: torch.Tensor | None = optimizer.grad_scale  # type: ignore[attr-defined]
    if float(found) > 0:
        return False
    if scale is not None:
        inverse = float(scale.double().reciprocal().float())  # as GradScaler.unscale_ has it, to the bit
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(inverse)
    return True
