"""Gradient descent as a torch optimizer, for means that many workers must apply to the bit alike.

torch.optim.SGD couples weight decay with the gradient, and its fused multiply-add differs between processors. Here
decay is decoupled, as everywhere in dlion, and every product and sum is rounded on its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlion.layout import local

WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # computed in, and then rounded once


class Descent(torch.optim.Optimizer):
    """`p = p*(1 - lr*weight_decay) - lr*g`.

    Args:
        lr: 0.01, because the papers tune it for each task.
        settings: further entries of the parameter groups.
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.01, weight_decay: float = 0.0, maximize: bool = False, **settings: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "maximize": maximize, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; a closure is not called."""
        for group in self.param_groups:
            lr = float(group["lr"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                here, grad = local(param), local(param.grad)
                wide = WIDE.get(here.dtype, here.dtype)
                grad = (-grad if group["maximize"] else grad).to(wide)
                step = self.direction(self.state[param], grad, group) * lr
                here.copy_(here.to(wide) * (1 - lr * group["weight_decay"]) - step)

    def direction(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        """What is subtracted lr times."""
        return grad


class HeavyBall(Descent):
    """Descent along `buffer = momentum*buffer + g`.

    Args:
        momentum: 0.9, what those papers most often use that leave the optimizer open.
    """

    def __init__(self, params: ParamsT, momentum: float = 0.9, **others: Any) -> None:
        super().__init__(params, momentum=momentum, **others)

    def direction(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        buffer: Tensor = state.setdefault("momentum_buffer", torch.zeros_like(grad))
        buffer.copy_(buffer * group["momentum"] + grad)
        return buffer


class AheadOfBall(HeavyBall):
    """Descent along `g + buffer`, PowerSGD's form of momentum (arXiv 1905.13727, Algorithm 2)."""

    def direction(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        return grad + super().direction(state, grad, group)
