"""Accelerate: gradients stay local in what it prepares, and its checkpoints keep every worker's momentum."""

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dlion.integrations import ddp, momenta
from dlion.optim import Distributed

try:
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
except ImportError as error:
    raise ImportError('dlion.integrations.accelerate needs accelerate: pip install "dlion[accelerate]"') from error

UNPREPARED = "accelerator.prepare was given no optimizer; give it the model and the optimizer"


class LocalGradients(DistributedDataParallelKwargs):
    """How `prepare` wraps a model: as it was asked to, and without averaging."""

    def register_comm_hook(self, model: nn.Module) -> None:
        ddp.local_gradients(model)


def local_gradients(accelerator: Accelerator) -> Accelerator:
    """Make every worker keep its gradients to itself, and `save_state` keep every worker's momentum.

    Call it on all workers, before `prepare`; calling it again is harmless. `save_state` gives all workers the same
    buffers and writes a folder `dlion` beside what Accelerate writes; `load_state` reads it, and warns where there is
    none. Every optimizer that is prepared must be dlion's then, or `prepare` raises a ValueError: any other would train
    each worker apart.

    Args:
        accelerator: modified in place.

    Returns:
        The same accelerator.

    Raises:
        ValueError: it averages gradients in a way that cannot be switched off (FSDP, DeepSpeed, ...), was asked for a
            communication hook, has prepared a model before, or does not see the other workers.
    """
    kind = accelerator.distributed_type.value
    if not kind.startswith(("NO", "MULTI_")):
        raise ValueError(
            f"Accelerate with distributed_type={kind} averages gradients itself, and votes need local ones: let it use "
            "DDP (MULTI_GPU, MULTI_CPU), or shard the model yourself and call dlion.local_gradients(model)"
        )
    workers = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != workers:
        raise ValueError(
            f"Accelerate sees {accelerator.num_processes} process where WORLD_SIZE={workers}, so every worker would "
            "train apart: without an accelerator it wants Accelerator(cpu=True), or TrainingArguments(use_cpu=True)"
        )
    given = accelerator.ddp_handler or DistributedDataParallelKwargs()
    if isinstance(given, LocalGradients):
        return accelerator
    if given.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"comm_hook={given.comm_hook.value!r} averages gradients, and votes need local ones: leave it out of "
            "DistributedDataParallelKwargs"
        )
    if accelerator._models:
        raise ValueError(
            f"{len(accelerator._models)} model was prepared already, and goes on averaging gradients: call "
            "local_gradients(accelerator) before accelerator.prepare(model)"
        )
    accelerator.ddp_handler = LocalGradients(**vars(given))
    accelerator.register_save_state_pre_hook(partial(_save, accelerator))
    kept = ExitStack()
    accelerator.register_load_state_pre_hook(partial(_load, accelerator, kept))
    # no hook is called at the end of load_state, nor of optimizers that are prepared
    accelerator.load_state = _closing(kept, accelerator.load_state)
    accelerator.prepare_optimizer = _of_ours(accelerator.prepare_optimizer)
    return accelerator


def bare(optimizer: Any) -> Distributed:
    """The optimizer that Accelerate has wrapped.

    Raises:
        ValueError: it is none of dlion's.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, Distributed):
        raise ValueError(
            f"the optimizer is {type(inner).__name__} and gradients are local, so every worker would train apart: use "
            "dlion.DistributedLion or dlion.Distributed, or do not call local_gradients"
        )
    return inner


def _save(accelerator: Accelerator, models: list[nn.Module], weights: list[Any], folder: str) -> None:
    if not accelerator._optimizers:
        warnings.warn(f"{folder} keeps nobody's momentum: {UNPREPARED}", stacklevel=4)
    for model in models:
        ddp.synchronize_buffers(model)  # in place: what is written in a moment are references
    momenta.save(folder, models, [bare(optimizer) for optimizer in accelerator._optimizers])


def _load(accelerator: Accelerator, kept: ExitStack, models: list[nn.Module], folder: str) -> None:
    optimizers = [bare(optimizer) for optimizer in accelerator._optimizers]
    if not optimizers:
        warnings.warn(f"nobody's momentum is taken from {folder}: {UNPREPARED}", stacklevel=4)
    for optimizer in momenta.load(folder, models, optimizers):
        kept.callback(_keep_own(optimizer))


def _keep_own(optimizer: Distributed) -> Callable[[], None]:
    """Have `load_state_dict` keep what is there: Accelerate gives every worker that of worker 0; what ends it."""
    own = optimizer.state_dict()

    def instead(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        return own

    return optimizer.register_load_state_dict_pre_hook(instead).remove


def _closing(kept: ExitStack, load_state: Callable[..., None]) -> Callable[..., None]:
    @wraps(load_state)
    def load(*args: Any, **options: Any) -> None:
        with kept:  # well or not: a state that the caller loads later is the caller's
            load_state(*args, **options)

    return load


def _of_ours(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(prepare)
    def prepare_optimizer(optimizer: Any, *args: Any, **options: Any) -> Any:
        bare(optimizer)
        return prepare(optimizer, *args, **options)

    return prepare_optimizer
