"""Whether a checkpoint is of this model and this optimizer: found out before anything changes."""

from torch import Tensor, nn

from dlion.checkpoint.holdings import Holdings, buffers_of, names_of, parameters_of, split
from dlion.errors import CheckpointError
from dlion.optim import Distributed
from dlion.simulate import Simulation

SAME = "load the checkpoint of the same model"


def check_between_steps(optimizer: Distributed, what: str) -> None:
    """Raise a CheckpointError where ballots have left: momenta have moved, and parameters have not."""
    begun = optimizer._begun if isinstance(optimizer, Simulation) else optimizer._renewal.begun is not None
    if begun:
        raise CheckpointError(f"a checkpoint was to be {what} within a step: do it before backward, or after step()")


def check_fit(model: nn.Module, optimizer: Distributed, found: Holdings) -> None:
    """Compare names, shapes, dtypes and groups; momenta alone may have another dtype, that of the optimizer is taken.

    Raises:
        CheckpointError: says what differs first.
    """
    names = names_of(model, optimizer)
    here = {f"parameter/{name}": param for name, param in parameters_of(model)}
    here |= {f"buffer/{name}": buffer for name, buffer in buffers_of(model)}
    _check_tensors(here, found)
    _check_groups(
        [[names[param] for param in group["params"]] for group in optimizer.param_groups],
        [group["names"] for group in found.said["groups"]],
    )
    _check_state({name: param for param, name in names.items()}, optimizer, found)


def _check_tensors(here: dict[str, Tensor], found: Holdings) -> None:
    there = {
        key: value for key, value in (found.common | found.own).items() if key.startswith(("parameter/", "buffer/"))
    }
    for key in sorted(here.keys() ^ there.keys(), reverse=True):  # parameters first
        kind, _, name = key.partition("/")
        where = "not in the checkpoint" if key in here else "not in this model"
        raise CheckpointError(f"the {kind} {name} is {where}: {SAME}")
    for key, value in here.items():
        kind, _, name = key.partition("/")
        if value.shape != found.size(key):
            raise CheckpointError(
                f"the {kind} {name} has shape {list(value.shape)} and {list(found.size(key))} in the checkpoint: {SAME}"
            )
        if value.dtype != there[key].dtype:
            raise CheckpointError(
                f"the {kind} {name} is {_said(value)} and {_said(there[key])} in the checkpoint, and nothing is "
                "converted: load it into a model of the saved dtypes, and convert that one afterwards"
            )


def _check_groups(here: list[list[str]], there: list[list[str]]) -> None:
    mine = {name: index for index, names in enumerate(here) for name in names}
    saved = {name: index for index, names in enumerate(there) for name in names}
    apart = [name for name in {**mine, **saved} if mine.get(name) != saved.get(name)]
    if not apart and len(here) == len(there):
        return
    counts = f"the optimizer has {len(here)} parameter groups and {len(there)} were saved"
    moved = [f"{name} is in {_group(mine.get(name))} here and in {_group(saved.get(name))} there" for name in apart[:3]]
    more = [f"and so on for {len(apart) - 3} more parameters"] if len(apart) > 3 else []
    again = "in the saved order" if sorted(map(sorted, here)) == sorted(map(sorted, there)) else "as they were saved"
    raise CheckpointError(f"{counts}{': ' if moved else ''}{', '.join(moved + more)}: make the groups {again}")


def _group(index: int | None) -> str:
    return "none" if index is None else f"group {index}"


def _check_state(params: dict[str, Tensor], optimizer: Distributed, found: Holdings) -> None:
    whole = set(optimizer.rule.kept).difference(optimizer.rule.thin)
    for key, what, name, value in split(found):
        if name not in params:
            raise CheckpointError(f"the {what} of {name} is of no parameter of this optimizer: {SAME}")
        if what in whole and (found.size(key) != params[name].shape or not value.is_floating_point()):
            raise CheckpointError(
                f"the {what} of {name} is {_said(value)} of shape {list(found.size(key))} in the checkpoint, and the "
                f"parameter has shape {list(params[name].shape)}: {SAME}"
            )


def _said(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
