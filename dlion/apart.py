"""Parameters whose gradients stay local are moved by votes alone: another optimizer would train every worker apart."""

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlion.callers import warn_caller
from dlion.errors import ranks_text
from dlion.untraced import untraced

if TYPE_CHECKING:
    from dlion.optim import Distributed

_local: "WeakValueDictionary[int, Tensor]" = WeakValueDictionary()  # by identity: tensors compare by element
_among: dict[int, tuple[int, ...]] = {}  # the ranks whose replicas were made equal
_voting: "WeakSet[Distributed]" = WeakSet()
_told: "WeakSet[Optimizer]" = WeakSet()
_watching: list[Any] = []


def watch(params: Iterable[Tensor], ranks: Sequence[int]) -> None:
    """Warn where an optimizer that does not vote steps with these parameters, whose replicas the ranks have."""
    here = tuple(sorted(ranks))
    for param in params:
        if id(param) not in _among:
            weakref.finalize(param, _among.pop, id(param), None)
        _local[id(param)], _among[id(param)] = param, here
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_look))


def votes(optimizer: "Distributed") -> None:
    """Know an optimizer whose parameters are moved by votes."""
    _voting.add(optimizer)


def check_voters(params: Iterable[Tensor], ranks: Sequence[int]) -> None:
    """Warn where replicas of these parameters are on other ranks than those that vote."""
    here = tuple(sorted(ranks))
    for param in params:
        replicas = _among.get(id(param), ()) if _local.get(id(param)) is param else ()
        if replicas and replicas != here:
            warn_caller(
                f"{ranks_text(list(ranks))} vote together and local_gradients was called for "
                f"{ranks_text(list(replicas))}, so there are several trainings side by side: give both the same "
                "process_group"
            )
            return


def _look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _is_apart(optimizer):
        warn_caller(
            f"{type(optimizer).__name__}.step() moves parameters whose gradients stay on each worker, so every worker "
            "trains apart, unless you average these gradients yourself: use dlion.DistributedLion or dlion.Distributed "
            "for them, or do not call local_gradients"
        )


def _may_move(group: dict[str, Any]) -> bool:
    """Whether its learning rate is not 0, as far as is known without waiting for a device."""
    lr = group.get("lr", 1.0)
    return isinstance(lr, Tensor) or bool(lr != 0)


@untraced
def _is_apart(optimizer: Optimizer) -> bool:
    """Whether it moves, without votes, what stays local; said once."""
    if optimizer in _voting or optimizer in _told:
        return False
    # some methods step with one of torch's optimizers, whose groups are then theirs, with a count of verdicts
    groups = [group for group in optimizer.param_groups if "t" not in group and _may_move(group)]
    held = {id(param) for group in groups for param in group["params"] if _local.get(id(param)) is param}
    for voter in list(_voting) if held else ():
        # of one that steps around it; getattr: another thread may be making it
        held -= {id(param) for group in getattr(voter, "param_groups", ()) for param in group["params"]}
    if held:
        _told.add(optimizer)
    return bool(held)
