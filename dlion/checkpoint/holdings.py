"""What a checkpoint holds of a worker, under names of parameters; and putting a worker back where it was.

parameter/NAME        equal on all workers      buffer/NAME           a worker's own
shared/STATE/NAME     equal on all workers      own/STATE/NAME        a worker's own
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlion.layout import local, overwrite
from dlion.optim import Distributed
from dlion.quoting import one_line
from dlion.replica import Replica
from dlion.sharding import in_shards, is_sharded
from dlion.simulate import Simulation

COMPILED = "_orig_mod."  # in the names of a compiled module's parameters

State = dict[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Holdings:
    """All that a worker must have to go on; of a sharded one, what a process must have.

    Attributes:
        common: tensors that are equal on all workers. own: tensors that are not. By name. Sharded ones are DTensors
            where they are saved, and their local parts where they were found in a checkpoint.
        said: groups of the optimizer with the names of their parameters, counters, and the caller's.
        sizes: the shapes of whole tensors, of those whose local parts were found.
    """

    common: dict[str, Tensor]
    own: dict[str, Tensor]
    said: dict[str, Any]
    sizes: Mapping[str, torch.Size] = field(default_factory=dict)

    def size(self, key: str) -> torch.Size:
        """The shape of a tensor, whatever part of it is here."""
        tensor = self.common[key] if key in self.common else self.own[key]
        return self.sizes.get(key, tensor.shape)


@torch.no_grad()  # then local shards are the same objects each time
def holdings_of(model: nn.Module, optimizer: Distributed, rank: int, extra: Any) -> Holdings:
    """What a worker here has. Nothing is copied.

    Raises:
        ValueError: a parameter of the optimizer is not the model's, or something cannot be saved in shards.
    """
    names = names_of(model, optimizer)
    state = _state_of(optimizer, rank)
    shared = {id(tensor) for tensor in optimizer.rule.shared_state(Replica(optimizer.param_groups, state))}
    common = {f"parameter/{name}": param.detach() for name, param in parameters_of(model)}
    own = {f"buffer/{name}": buffer for name, buffer in _buffers_of(model, optimizer, rank)}
    plain: dict[str, dict[str, Any]] = {}  # state that is no tensor
    for param, kept in state.items():
        for key, value in kept.items():
            if not isinstance(value, Tensor):
                plain.setdefault(names[param], {})[key] = value
            elif is_sharded(param) and not is_sharded(value) and value.dim():
                raise ValueError(
                    f"the {key} of {names[param]} is made for this rank's shard, and no other shards could take it "
                    f"over: train sharded models with another method than {optimizer.method!r} to save them"
                )
            elif id(local(value)) in shared:
                common[f"shared/{key}/{names[param]}"] = value.detach()
            else:
                own[f"own/{key}/{names[param]}"] = value.detach()
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"t": int(group["t"]), "names": [names[param] for param in group["params"]]}
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
            f"({one_line(str(error), 150)}): give numbers, text, tensors and lists or dictionaries of them"
        ) from None
    return file.getvalue()


@torch.no_grad()
def restore(model: nn.Module, optimizer: Distributed, rank: int, found: Holdings) -> None:
    """Put a worker here where the saved one was, after `check_fit`; first what callers' hooks can refuse."""
    buffers = {key.removeprefix("buffer/"): value for key, value in found.own.items() if key.startswith("buffer/")}
    state = _as_state_dict(model, optimizer, found)
    if isinstance(optimizer, Simulation):
        optimizer.load_state_dict(state, rank)
        optimizer.stats_of(rank).load_state_dict(found.said["stats"])
        optimizer.load_buffers({name: buffers[_plain(name)] for name in optimizer.buffers(rank)}, rank)
    else:
        optimizer.load_state_dict(state)
        optimizer.stats.load_state_dict(found.said["stats"])
        for name, buffer in buffers_of(model):
            overwrite(buffer, buffers[name].to(buffer.device))
    for name, param in parameters_of(model):
        overwrite(local(param), found.common[f"parameter/{name}"].to(param.device))


def _as_state_dict(model: nn.Module, optimizer: Distributed, found: Holdings) -> dict[str, Any]:
    """The state in the order of this optimizer, as its `load_state_dict` takes it."""
    names = names_of(model, optimizer)
    order = [names[param] for group in optimizer.param_groups for param in group["params"]]
    number = {name: index for index, name in enumerate(order)}
    state: dict[int, dict[str, Any]] = {number[name]: dict(kept) for name, kept in found.said["plain"].items()}
    params = {name: param for param, name in names.items()}
    for key, what, name, value in split(found):
        whole = in_shards(value, params[name]) if key in found.sizes else value
        state.setdefault(number[name], {})[what] = whole
    groups = []
    for group, saved in zip(optimizer.param_groups, found.said["groups"], strict=True):
        kept = {key: value for key, value in saved.items() if key != "names"}
        kept |= {key: group[key] for key in ("param_names",) if key in group}
        groups.append(kept | {"params": [number[names[param]] for param in group["params"]]})
    return {"state": state, "param_groups": groups}


def split(found: Holdings) -> Iterator[tuple[str, str, str, Tensor]]:
    """The state of parameters: (key, what it is, name of the parameter, value)."""
    for key, value in (found.common | found.own).items():
        kind, _, rest = key.partition("/")
        if kind in ("shared", "own"):
            yield key, rest.partition("/")[0], parameter_of(key), value


def parameter_of(key: str) -> str:
    """The name of the parameter that a key is about, "" where it is about none."""
    kind, _, rest = key.partition("/")
    return rest if kind == "parameter" else rest.partition("/")[2] if kind in ("shared", "own") else ""


def names_of(model: nn.Module, optimizer: Distributed) -> dict[Tensor, str]:
    """The names of the model's parameters, which are those of the optimizer and more.

    Raises:
        ValueError: a parameter of the optimizer is not the model's; or a buffer is a DTensor.
    """
    for name, buffer in buffers_of(model):
        if is_sharded(buffer):
            raise ValueError(
                f"the buffer {name} is sharded (a DTensor), and dlion.checkpoint shards parameters and their state "
                "alone: register a whole tensor, or make it a parameter that is frozen"
            )
    names: dict[Tensor, str] = {param: name for name, param in parameters_of(model)}
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in names:
                raise ValueError(
                    f"parameter {position} of the optimizer's group {index} is none of the model's: give the model "
                    "that the optimizer trains"
                )
    return names


def _state_of(optimizer: Distributed, rank: int) -> State:
    if isinstance(optimizer, Simulation):
        with optimizer.seen_by(rank):
            return dict(optimizer.state)
    return dict(optimizer.state)


def _buffers_of(model: nn.Module, optimizer: Distributed, rank: int) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(optimizer, Simulation):
        yield from buffers_of(model)
        return
    for name, buffer in optimizer.buffers(rank).items():
        yield _plain(name), buffer


def parameters_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """By the names that they have in a checkpoint."""
    for name, param in bare(model).named_parameters():
        yield _plain(name), param


def buffers_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """By the names that they have in a checkpoint."""
    for name, buffer in bare(model).named_buffers():
        yield _plain(name), buffer.detach()


def bare(model: nn.Module) -> nn.Module:
    """The model inside torch's wrappers: names shall not depend on them."""
    model = getattr(model, COMPILED.rstrip("."), model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def _plain(name: str) -> str:
    return name.replace(COMPILED, "")
