"""Loading a worker's own state: momentum keeps its dtype, where torch casts it to the parameter's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def momenta_kept(optimizer: torch.optim.Optimizer, dtype_of: Callable[[Tensor], torch.dtype]) -> Iterator[None]:
    """Within, `optimizer.load_state_dict` keeps each `exp_avg` in `dtype_of(parameter)`, a copy of what was given.

    The caller's own hooks run before and after it: they may change what is loaded, and see what was.

    Raises:
        ValueError: a momentum has another shape than its parameter; nothing was loaded.
    """
    found: list[tuple[Tensor, Tensor]] = []

    def restore(loaded: torch.optim.Optimizer) -> None:
        for param, momentum in found:
            kept = momentum.detach().to(param.device, dtype_of(param), copy=True)
            loaded.state[param]["exp_avg"] = kept.contiguous()

    before = optimizer.register_load_state_dict_pre_hook(lambda _, given: found.extend(_momenta(optimizer, given)))
    after = optimizer.register_load_state_dict_post_hook(restore, prepend=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _momenta(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """(parameter, its momentum) of a state dict that has not been loaded yet."""
    order = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = []
    for index, param in zip(order, params, strict=False):  # torch itself refuses other lengths, after this
        momentum = state_dict["state"].get(index, {}).get("exp_avg")
        if momentum is None:
            continue
        if momentum.shape != param.shape:
            raise ValueError(
                f"exp_avg of parameter {index} has shape {list(momentum.shape)} and the parameter "
                f"{list(param.shape)}: load the state of the same model"
            )
        found.append((param, momentum))
    return found
