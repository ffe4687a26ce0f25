"""Which optimizers take their steps on the device."""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from dlion.layout import local
from dlion.ops.kept import is_captured
from dlion.resident import by_torch


def is_accelerator(device: torch.device) -> bool:
    """Whether the host starts what this device does and need not wait for it."""
    return device.type != "cpu"


def resides(fused: bool, params: Sequence[Tensor], wire: torch.device | None) -> bool:
    """Whether steps are taken on the device: Lion's votes, with parameters where rows travel, on an accelerator.

    Args:
        fused: whether the method's steps are Lion's votes. params: those that are trained.
        wire: where rows lie for the group; None for one worker alone.
    """
    places = {local(param).device for param in params} | ({wire} if wire is not None else set())
    return fused and bool(params) and len(places) == 1 and is_accelerator(places.pop())


def kernels_for(name: str) -> ModuleType:
    """What steps on the device are made of: `dlion.resident.by_torch`, or what has the same names and bits.

    Args:
        name: of the kernels in use; "triton", or pure torch.
    """
    return import_module("dlion.resident.by_triton") if name == "triton" else by_torch


def refuse_new_in_graph(device: torch.device) -> None:
    """Raise a ValueError where a step that workers must agree on first would go into a graph."""
    if is_captured(device):
        raise ValueError(
            "the first step after an optimizer was made or loaded, or its parameters were others, cannot be captured "
            "in a graph: call step() once or more before the capture"
        )
