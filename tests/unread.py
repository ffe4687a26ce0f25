"""Tensors that nobody may read: code inside `unread()` fails where it asks a tensor for its values.

On an accelerator each such question would wait for everything that is queued there, and end the capture of a graph.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    raise RuntimeError("torch has a new place for TorchDispatchMode, the only way to see what tensors do") from error

METHODS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "cpu", "is_nonzero")
# operators that bring a value to the host, or make a tensor of a size that depends on values
OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")

_here = threading.local()


class ReadError(AssertionError):
    """A value was asked for."""


class Operators(TorchDispatchMode):
    """Looks at every operator that this thread asks for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__.rpartition(".")[2]
        places = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(isinstance(place, Tensor) and place.dtype == torch.bool for place in places)
        if (name in OPERATORS or masked) and watched():
            raise ReadError(f"{name} waits for its tensors")
        return function(*args, **(kwargs or {}))


def watched() -> bool:
    """Whether this thread is within `unread()`, and not within `read()` there."""
    return getattr(_here, "watched", False)


@pytest.fixture(autouse=True, scope="module")
def watch() -> Iterator[None]:
    """Import it: without, `unread()` does not see what is asked by Python."""

    def guarded(name: str) -> Any:
        function = getattr(Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if watched():
                raise ReadError(f"{name} of a tensor was asked for")
            return function(*args, **kwargs)

        return call

    where = torch.where

    def of_tensors(*args: Any, **kwargs: Any) -> Any:
        """torch.where brings a plain number to the device, and waits for it."""
        if watched() and not all(isinstance(arg, Tensor) for arg in args):
            raise ReadError("where was given a number")
        return where(*args, **kwargs)

    put = Tensor.__setitem__

    def of_a_tensor(self: Tensor, place: Any, value: Any) -> None:
        """A plain number for one element goes through the host's memory, and is waited for."""
        if watched() and not isinstance(value, Tensor) and self[place].dim() == 0:
            raise ReadError("an element was given a number")
        put(self, place, value)

    with ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(mock.patch.object(Tensor, name, guarded(name)))
        stack.enter_context(mock.patch.object(torch, "where", of_tensors))
        stack.enter_context(mock.patch.object(Tensor, "__setitem__", of_a_tensor))
        yield


@contextmanager
def unread() -> Iterator[None]:
    """Inside, this thread reads no tensor; a ReadError otherwise."""
    _here.watched = True
    try:
        with Operators():
            yield
    finally:
        _here.watched = False


@contextmanager
def read() -> Iterator[None]:
    """Inside, it may again."""
    before, _here.watched = watched(), False
    try:
        yield
    finally:
        _here.watched = before
