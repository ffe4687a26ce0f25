"""Every worker's state beside a framework's own checkpoint, which keeps that of one worker.

What is written is a checkpoint of `dlion.checkpoint` for each optimizer, with the parameters that it trains: frozen
ones are in the framework's own files.
"""

import shutil
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn

from dlion import checkpoint
from dlion.checkpoint.crew import crew_of
from dlion.checkpoint.holdings import COMPILED, bare
from dlion.optim import Distributed


def save(folder: str | Path, models: Iterable[nn.Module], optimizers: Sequence[Distributed]) -> None:
    """Write every worker's state into `folder`, which all workers must see; all call it. What was there is replaced.

    Raises:
        CheckpointError: on all workers, if it could not be written on any. ExchangeError: a worker was lost.
    """
    for number, optimizer in enumerate(optimizers):
        path = _path(folder, number)
        crew = crew_of(optimizer, None, None, loading=False)
        if crew.leads:  # of a checkpoint that the framework has written over by now
            shutil.rmtree(path, ignore_errors=True)
        checkpoint.save(path, _trained(models, optimizer), optimizer)


def load(folder: str | Path, models: Iterable[nn.Module], optimizers: Sequence[Distributed]) -> list[Distributed]:
    """Give every worker its own state back; all call it. Warns of each optimizer of which `folder` has none.

    Returns:
        The optimizers that have theirs now.

    Raises:
        CheckpointError: on all workers: it is damaged, or of another model or method. ExchangeError: a worker was lost.
    """
    loaded = []
    for number, optimizer in enumerate(optimizers):
        path = _path(folder, number)
        if not any(crew_of(optimizer, None, None, loading=True).told("load", path.exists)):
            warnings.warn(
                f"{path} is missing, so every worker goes on with the momentum of worker 0, and the run will not be "
                "the one that was interrupted: save with dlion.integrations in use, and keep that folder",
                stacklevel=2,
            )
            continue
        checkpoint.load(path, _trained(models, optimizer), optimizer)
        loaded.append(optimizer)
    return loaded


def _path(folder: str | Path, number: int) -> Path:
    return Path(folder) / (f"dlion-{number}" if number else "dlion")


def _trained(models: Iterable[nn.Module], optimizer: Distributed) -> nn.Module:
    """A module of the parameters that `optimizer` trains, and of all buffers: the models' own tensors."""
    mine = {param for group in optimizer.param_groups for param in group["params"]}
    module = nn.Module()
    for number, model in enumerate(map(bare, models)):
        for name, param in model.named_parameters():
            if param in mine:
                module.register_parameter(_as_one_name(number, name), param)
        for name, buffer in model.named_buffers():
            module.register_buffer(_as_one_name(number, name), buffer)
    return module


def _as_one_name(number: int, name: str) -> str:
    """A name that a module may register: without dots; different ones stay different."""
    return f"{number}/{name.replace(COMPILED, '').replace('/', '//').replace('.', '/')}"
