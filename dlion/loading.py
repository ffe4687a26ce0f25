"""Loading a worker's own state: momenta keep their dtype, where torch casts them to the parameter's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def momenta_kept(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    thin: Sequence[str],
    dtype_of: Callable[[Tensor], torch.dtype],
) -> Iterator[None]:
    """Within, `optimizer.load_state_dict` keeps the state of these names in `dtype_of(parameter)`, a copy of the given.

    Those in `thin` may have another shape than their parameter. The caller's own hooks run before and after it: they
    may change what is loaded, and see what was.

    Raises:
        ValueError: a momentum has another shape than its parameter; nothing was loaded.
    """
    found: list[tuple[Tensor, str, Tensor]] = []

    def restore(loaded: torch.optim.Optimizer) -> None:
        for param, name, momentum in found:
            kept = momentum.detach().to(param.device, dtype_of(param), copy=True)
            loaded.state[param][name] = kept.contiguous()

    def find(_: torch.optim.Optimizer, given: dict[str, Any]) -> None:
        found.extend(_momenta(optimizer, names, thin, given))

    before = optimizer.register_load_state_dict_pre_hook(find)
    after = optimizer.register_load_state_dict_post_hook(restore, prepend=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _momenta(
    optimizer: torch.optim.Optimizer, names: Sequence[str], thin: Sequence[str], state_dict: dict[str, Any]
) -> list[tuple[Tensor, str, Tensor]]:
    """(parameter, name, its momentum) of a state dict that has not been loaded yet."""
    order = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = []
    for index, param in zip(order, params, strict=False):  # torch itself refuses other lengths, after this
        kept = state_dict["state"].get(index, {})
        for name in names:
            momentum = kept.get(name)
            if momentum is None:
                continue
            if momentum.shape != param.shape and name not in thin:
                raise ValueError(
                    f"{name} of parameter {index} has shape {list(momentum.shape)} and the parameter "
                    f"{list(param.shape)}: load the state of the same model"
                )
            found.append((param, name, momentum))
    return found
