"""Checkpoints of other Lion implementations: their momentum goes on, their weight decay is put into our terms.

Four conventions of weight decay are in use (p: parameter, lr: of this step, wd: what the user gave):

    decoupled          ``p *= 1 - lr * wd``             the paper, dlion, lion-pytorch, timm, DeepSpeed
    over initial lr    ``p *= 1 - lr * (wd / lr0)``     lion-pytorch with decoupled_weight_decay=True
    over initial lr    ``p *= 1 - (lr / lr0) * wd``     llm-foundry, lr0 of each group
    coupled            inside the sign: ``g + wd * p``  bitsandbytes, 32 bits, in releases before July 2026

`migrate` translates the first three; the fourth has no counterpart, so only wd = 0 can go on from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor

from dlion.options import one_of


@dataclass(frozen=True)
class _Source:
    momentum: str  # its name in their state
    decay: str  # "decoupled", "over initial lr" or "coupled"


SOURCES = {
    "lion-pytorch": _Source("exp_avg", "decoupled"),
    "lion-pytorch-decoupled": _Source("exp_avg", "over initial lr"),
    "llm-foundry": _Source("exp_avg", "over initial lr"),
    "timm": _Source("exp_avg", "decoupled"),
    "deepspeed": _Source("exp_avg", "decoupled"),
    "bitsandbytes": _Source("state1", "decoupled"),
    "bitsandbytes-coupled": _Source("state1", "coupled"),
}
_WRAPPED = "__bnb_optimizer_quant_state__"  # where newer bitsandbytes puts the momentum, to keep FSDP from cutting it
_AS_THEY_ARE = ("params", "param_names", "lr", "initial_lr", "maximize")
_OTHER_ALGORITHMS = ("caution", "corrected_weight_decay")  # options of timm


def migrate(state_dict: Mapping[str, Any], source: str, *, initial_lr: float | None = None) -> dict[str, Any]:
    """The state dict of another Lion as one that `DistributedLion.load_state_dict` takes, on every worker.

        optimizer.load_state_dict(dlion.migrate(torch.load("optimizer.pt"), "timm"))

    All workers begin with the same momentum and differ from their first step on. Learning rate, betas, weight decay and
    `maximize` come along, t begins at 0. At N=1 the next step is theirs, except where a message is within rounding of
    zero.

    Args:
        state_dict: what their `state_dict()` gave; not changed. Parameters must come in the same order.
        source: a name of `dlion.migration.SOURCES`. "bitsandbytes-coupled": 32 bits, of a release before July 2026.
        initial_lr: the constructor's lr, where weight decay was divided by it ("lion-pytorch-decoupled"; "llm-foundry"
            has it in its groups, and None takes it from there).

    Raises:
        ValueError: another source; momentum in 8 bits; weight decay inside the sign; an option that makes it another
            algorithm than Lion; or no state dict of an optimizer at all.
    """
    one_of("source", source, tuple(SOURCES))
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "this is no state dict of an optimizer, which has 'state' and 'param_groups': give what its state_dict() "
            "gave; DeepSpeed with ZeRO keeps its state in pieces, which cannot be taken over"
        )
    kind = SOURCES[source]
    try:
        state = {index: _momentum(index, kept, kind.momentum) for index, kept in state_dict["state"].items() if kept}
        groups = [_group(index, kept, kind.decay, initial_lr) for index, kept in enumerate(state_dict["param_groups"])]
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"this is not the state dict that {source} writes ({type(error).__name__}: {error}): name the source that "
            "wrote it, and give it as it was"
        ) from error
    return {"state": state, "param_groups": groups}


def _momentum(index: Any, kept: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    kept = {**kept, **kept.get(_WRAPPED, {})}
    momentum = kept.get(name)
    if not isinstance(momentum, Tensor):
        raise ValueError(
            f"parameter {index} has no {name!r} but {', '.join(map(str, kept))}: name the source that wrote it"
        )
    if not momentum.is_floating_point() or momentum.itemsize == 1:
        raise ValueError(
            f"{name} of parameter {index} is {momentum.dtype}, quantized to 8 bits: only floating-point momenta can be "
            f"taken over; train a few hundred steps with 32 bits before you change, or start from zero momentum"
        )
    if "exp_avg_sq" in kept:
        raise ValueError(
            f"parameter {index} has exp_avg_sq, as Adam's have: a Lion keeps one momentum, and starts anew"
        )
    if not bool(momentum.isfinite().all()):
        raise ValueError(f"{name} of parameter {index} is not finite: take an earlier checkpoint")
    return {"exp_avg": momentum.detach().clone()}


def _group(index: int, group: Mapping[str, Any], decay: str, initial_lr: float | None) -> dict[str, Any]:
    for option in _OTHER_ALGORITHMS:
        if group.get(option):
            raise ValueError(
                f"group {index} has {option}={group[option]!r}, which is not Lion: nothing here does the same"
            )
    taken = {name: group[name] for name in _AS_THEY_ARE if name in group}
    try:
        lr, betas, weight_decay = float(group["lr"]), tuple(map(float, group["betas"])), float(group["weight_decay"])
    except (ValueError, RuntimeError) as error:
        raise TypeError(f"group {index} has an lr, betas or weight_decay that is no number: {error}") from error
    if not (0 <= lr < inf and 0 <= weight_decay < inf and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise ValueError(
            f"group {index} has lr={lr}, betas={betas}, weight_decay={weight_decay}: lr and weight_decay must be "
            "finite and 0 or above, betas two numbers in [0, 1)"
        )
    if weight_decay and decay == "coupled":
        raise ValueError(
            f"group {index} has weight_decay={weight_decay}, which this source adds to the gradient, inside the sign; "
            f"no decoupled decay does the same: set it to 0 in the given groups, and choose one for DistributedLion"
        )
    if weight_decay and decay == "over initial lr":
        weight_decay /= _initial_lr(index, group, initial_lr)
    return {"maximize": False, **taken, "betas": betas, "weight_decay": weight_decay, "t": 0}


def _initial_lr(index: int, group: Mapping[str, Any], given: float | None) -> float:
    value = given if given is not None else group.get("initial_lr")
    if isinstance(value, str) or value is None or not 0 < float(value) < inf:
        raise ValueError(
            f"group {index} divides weight_decay={group['weight_decay']} by the lr that its constructor was given, "
            f"which is {value!r} here: give initial_lr=..., above 0"
        )
    return float(value)
