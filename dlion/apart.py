"""Parameters whose gradients stay local are moved by votes alone: another optimizer would train every worker apart."""

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlion.optim import Distributed
from dlion.untraced import untraced

_local: "WeakValueDictionary[int, Tensor]" = WeakValueDictionary()  # by identity: tensors compare by element
_told: "WeakSet[Optimizer]" = WeakSet()
_watching: list[Any] = []


def watch(params: Iterable[Tensor]) -> None:
    """Warn where an optimizer that does not vote steps with these parameters."""
    _local.update({id(param): param for param in params})
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_look))


def _look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _is_apart(optimizer):
        warnings.warn(
            f"{type(optimizer).__name__}.step() moves parameters whose gradients stay on each worker, so every worker "
            "trains apart: use dlion.DistributedLion or dlion.Distributed for them, or do not call local_gradients",
            stacklevel=3,  # behind torch's wrapper of step()
        )


@untraced
def _is_apart(optimizer: Optimizer) -> bool:
    """Whether it moves, without votes, what stays local; said once."""
    if isinstance(optimizer, Distributed) or optimizer in _told:
        return False
    # some methods step with one of torch's optimizers, whose groups are then theirs, with a count of verdicts
    groups = [group for group in optimizer.param_groups if "t" not in group]
    if not any(_local.get(id(param)) is param for group in groups for param in group["params"]):
        return False
    _told.add(optimizer)
    return True
