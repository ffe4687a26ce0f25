"""What a checkpoint holds of a worker, under names of parameters; and putting a worker back where it was.

parameter/NAME        equal on all workers      buffer/NAME           a worker's own
shared/STATE/NAME     equal on all workers      own/STATE/NAME        a worker's own
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlion.errors import CheckpointError
from dlion.layout import overwrite
from dlion.optim import Distributed
from dlion.replica import Replica
from dlion.simulate import Simulation

COMPILED = "_orig_mod."  # in the names of a compiled module's parameters

State = dict[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Holdings:
    """All that a worker must have to go on.

    Attributes:
        common: tensors that are equal on all workers. own: tensors that are not. By name.
        said: groups of the optimizer with the names of their parameters, counters, and the caller's.
    """

    common: dict[str, Tensor]
    own: dict[str, Tensor]
    said: dict[str, Any]


def holdings_of(model: nn.Module, optimizer: Distributed, rank: int, extra: Any) -> Holdings:
    """What a worker here has. Nothing is copied.

    Raises:
        ValueError: a parameter of the optimizer is not the model's, or is a DTensor.
    """
    names = _names(model, optimizer)
    state = _state_of(optimizer, rank)
    shared = {id(tensor) for tensor in optimizer.rule.shared_state(Replica(optimizer.param_groups, state))}
    common = {f"parameter/{name}": param.detach() for name, param in _parameters(model)}
    own = {f"buffer/{name}": buffer for name, buffer in _buffers_of(model, optimizer, rank)}
    plain: dict[str, dict[str, Any]] = {}  # state that is no tensor
    for param, kept in state.items():
        for key, value in kept.items():
            if not isinstance(value, Tensor):
                plain.setdefault(names[param], {})[key] = value
            elif id(value) in shared:
                common[f"shared/{key}/{names[param]}"] = value.detach()
            else:
                own[f"own/{key}/{names[param]}"] = value.detach()
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"names": [names[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    stats = optimizer.stats_of(rank) if isinstance(optimizer, Simulation) else optimizer.stats
    return Holdings(common, own, {"groups": groups, "plain": plain, "stats": stats.state_dict(), "extra": extra})


def in_bytes(said: dict[str, Any]) -> bytes:
    """What a worker says beside tensors, as it is written.

    Raises:
        ValueError: it holds more than numbers, text, tensors and containers of them.
    """
    file = io.BytesIO()
    try:
        torch.save(said, file)
        torch.load(io.BytesIO(file.getbuffer()), weights_only=True)
    except Exception as error:
        raise ValueError(
            "extra= (or a hyper-parameter) holds what cannot be loaded without running its code "
            f"({' '.join(str(error).split())[:150]}): give numbers, text, tensors and lists or dictionaries of them"
        ) from None
    return file.getvalue()


def check(model: nn.Module, optimizer: Distributed, found: Holdings) -> None:
    """Find out, before anything changes, whether this is the model and the optimizer that were saved.

    Raises:
        CheckpointError: says what differs first.
    """
    here = {f"parameter/{name}": param for name, param in _parameters(model)}
    here |= {f"buffer/{name}": buffer for name, buffer in _buffers(model)}
    there = {
        key: value for key, value in (found.common | found.own).items() if key.startswith(("parameter/", "buffer/"))
    }
    for key in sorted(here.keys() ^ there.keys(), reverse=True):  # parameters first
        kind, _, name = key.partition("/")
        where = "not in the checkpoint" if key in here else "not in this model"
        raise CheckpointError(f"the {kind} {name} is {where}: load the checkpoint of the same model")
    for key, value in here.items():
        if value.shape != there[key].shape:
            kind, _, name = key.partition("/")
            raise CheckpointError(
                f"the {kind} {name} has shape {list(value.shape)} and {list(there[key].shape)} in the checkpoint: load "
                "the checkpoint of the same model"
            )
    names = _names(model, optimizer)
    groups = [sorted(names[param] for param in group["params"]) for group in optimizer.param_groups]
    saved = [sorted(group["names"]) for group in found.said["groups"]]
    if groups != saved:
        raise CheckpointError(
            f"the optimizer has {len(groups)} parameter groups and {len(saved)} were saved, or they hold other "
            "parameters: make the optimizer as the saved one was made"
        )


@torch.no_grad()
def restore(model: nn.Module, optimizer: Distributed, rank: int, found: Holdings) -> None:
    """Put a worker here where the saved one was, after `check`."""
    for name, param in _parameters(model):
        overwrite(param, found.common[f"parameter/{name}"].to(param.device, param.dtype))
    buffers = {key.removeprefix("buffer/"): value for key, value in found.own.items() if key.startswith("buffer/")}
    state = _as_state_dict(model, optimizer, found)
    if isinstance(optimizer, Simulation):
        optimizer.load_buffers({name: buffers[_plain(name)] for name in optimizer.buffers(rank)}, rank)
        optimizer.load_state_dict(state, rank)
        optimizer.stats_of(rank).load_state_dict(found.said["stats"])
        return
    for name, buffer in _buffers(model):
        overwrite(buffer, buffers[name].to(buffer.device))
    optimizer.load_state_dict(state)
    optimizer.stats.load_state_dict(found.said["stats"])


def _as_state_dict(model: nn.Module, optimizer: Distributed, found: Holdings) -> dict[str, Any]:
    """The state in the order of this optimizer, as its `load_state_dict` takes it."""
    names = _names(model, optimizer)
    order = [names[param] for group in optimizer.param_groups for param in group["params"]]
    number = {name: index for index, name in enumerate(order)}
    state: dict[int, dict[str, Any]] = {number[name]: dict(kept) for name, kept in found.said["plain"].items()}
    for key, value in (found.common | found.own).items():
        kind, _, rest = key.partition("/")
        if kind in ("shared", "own"):
            what, _, name = rest.partition("/")
            state.setdefault(number[name], {})[what] = value
    groups = []
    for group, saved in zip(optimizer.param_groups, found.said["groups"], strict=True):
        kept = {key: value for key, value in saved.items() if key != "names"}
        kept |= {key: group[key] for key in ("param_names",) if key in group}
        groups.append(kept | {"params": [number[names[param]] for param in group["params"]]})
    return {"state": state, "param_groups": groups}


def _names(model: nn.Module, optimizer: Distributed) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {param: name for name, param in _parameters(model)}
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in names:
                raise ValueError(
                    f"parameter {position} of the optimizer's group {index} is none of the model's: give the model "
                    "that the optimizer trains"
                )
            if hasattr(param, "to_local"):
                raise ValueError(
                    f"{names[param]} is sharded (a DTensor): dlion.checkpoint keeps whole parameters; save such a "
                    "model through torch.distributed.checkpoint"
                )
    return names


def _state_of(optimizer: Distributed, rank: int) -> State:
    if isinstance(optimizer, Simulation):
        with optimizer.seen_by(rank):
            return dict(optimizer.state)
    return dict(optimizer.state)


def _buffers_of(model: nn.Module, optimizer: Distributed, rank: int) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(optimizer, Simulation):
        yield from _buffers(model)
        return
    for name, buffer in optimizer.buffers(rank).items():
        yield _plain(name), buffer


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, param in _bare(model).named_parameters():
        yield _plain(name), param


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in _bare(model).named_buffers():
        yield _plain(name), buffer.detach()


def _bare(model: nn.Module) -> nn.Module:
    """The model inside torch's wrapper: names shall not depend on it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _plain(name: str) -> str:
    return name.replace(COMPILED, "")
