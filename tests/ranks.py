"""Ranks of a framework's tests: what a launcher tells them, what they must send, and what they hold in the end."""

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from processes import meet
from torch import Tensor, nn

from dlion.optim import Distributed


def meet_as_launched(folder: Path, rank: int, size: int) -> None:
    """Make the default process group, and set what torchrun sets: frameworks look for it, and find the group made."""
    told = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": 0}
    os.environ |= {name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "127.0.0.1"}
    meet(folder, "store", rank, size)


def bytes_sent(params: Iterable[Tensor], workers: int) -> int:
    """What each worker sends in one step of a majority vote, one bucket and `topology="sharded"`: docs/methods.md."""
    words = sum(-(-param.numel() // 64) for param in params)
    shard = 16 + 8 * -(-words // workers)
    return 2 * (workers - 1) * shard


def gradients(model: nn.Module) -> list[float]:
    return [x for param in model.parameters() if param.grad is not None for x in param.grad.flatten().tolist()]


def held(model: nn.Module, optimizer: Distributed) -> list[list[float]]:
    """Parameters, buffers and momenta: what a run must go on from."""
    momenta = [optimizer.state[param]["exp_avg"] for group in optimizer.param_groups for param in group["params"]]
    return [tensor.detach().double().flatten().tolist() for tensor in (*parameters(model), *model.buffers(), *momenta)]


def parameters(model: nn.Module) -> list[Tensor]:
    return [param.detach() for param in model.parameters()]


@contextmanager
def told(said: list[str]) -> Iterator[None]:
    """Put the warnings of what happens inside into `said`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said += [str(warning.message) for warning in caught]


def refusal(act: object) -> str:
    """What a ValueError says that `act()` raises."""
    try:
        act()  # type: ignore[operator]
    except ValueError as error:
        return str(error)
    return "nothing"


def equal_bits(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
