"""Dynamo leaves dealings with other workers alone: traced, a step would be compiled anew for every t.

torch.compiler.disable imports all of Dynamo, which takes two seconds. torch's own optimizers do that when the first one
is made and not before: so a function is marked where it is defined, and Dynamo is told when an optimizer is made.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])

_not_told: list[Callable[[], None]] = []


def untraced(function: AnyCallable) -> AnyCallable:
    """Have Dynamo call `function` as it is, with all that it calls, once `tell_dynamo` was called."""
    told: list[Callable[..., Any]] = [function]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return told[0](*args, **kwargs)

    def tell() -> None:
        told[0] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    _not_told.append(tell)
    return cast(AnyCallable, call)


def tell_dynamo() -> None:
    """Tell Dynamo of all functions that were marked since the last call."""
    while _not_told:
        _not_told.pop()()
