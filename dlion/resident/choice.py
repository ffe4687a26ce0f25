"""Which optimizers take their steps on the device."""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from dlion.layout import local
from dlion.resident import applying


def is_accelerator(device: torch.device) -> bool:
    """Whether the host starts what this device does and need not wait for it."""
    return device.type != "cpu"


def resides(fused: bool, overlap: bool, params: Sequence[Tensor], wire: torch.device | None) -> bool:
    """Whether steps are taken on the device: Lion's votes, with parameters where rows travel, on an accelerator.

    With overlap a bucket begins during backward, where nobody may hear of the step before.

    Args:
        fused: whether the method's steps are Lion's votes. params: those that are trained.
        wire: where rows lie for the group; None for one worker alone.
    """
    places = {local(param).device for param in params} | ({wire} if wire is not None else set())
    return fused and not overlap and bool(params) and len(places) == 1 and is_accelerator(places.pop())


def kernels_for(name: str) -> ModuleType:
    """What makes ballots and applies verdicts by numbers on the device: `ballot`, `apply_there` and whom it `knows`.

    Args:
        name: of the kernels in use; "triton", or pure torch.
    """
    return import_module("dlion.ops.triton") if name == "triton" else applying
