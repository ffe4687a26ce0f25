"""What the host wrote to a device once, and kernels read in many steps; on any stream, and from graphs too."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_INTEGERS = {torch.float32: torch.int32, torch.int32: torch.int32, torch.int64: torch.int64}  # of the same bits


def is_captured(device: torch.device) -> bool:
    """Whether what is started now goes into a graph, to be done later, perhaps often."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """T[n] in device memory, each number rounded once; float32, int32 or int64. The host does not wait.

    A graph must not copy from memory of the host, which may have changed when it runs: there, the numbers are arguments
    of what writes them.
    """
    host = torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else dtype, device="cpu").to(dtype)
    if is_captured(device):
        kind = _INTEGERS[dtype]
        table = torch.zeros(len(values), dtype=kind, device=device)
        if len(values):
            _add_each(list(table.unbind()), host.view(kind).tolist())
        return table.view(dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _add_each(places: list[Tensor], numbers: list[int]) -> None:
    """A number to each place, as arguments of a launch."""
    try:
        torch._foreach_add_(places, numbers)
    except AttributeError:
        for place, number in zip(places, numbers, strict=True):
            place.add_(number)


_read_by_graphs: "set[Kept]" = set()  # for good: nobody says when a graph is gone


class Kept:
    """Tensors that were made on one stream, for kernels on any.

    Args:
        tensors: on `device`, made on its current stream.
    """

    def __init__(self, device: torch.device, *tensors: Tensor) -> None:
        self._device, self._tensors = device, tensors
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._streams = {stream.cuda_stream}
            if not is_captured(device):
                self._event = stream.record_event()

    def here(self) -> tuple[Tensor, ...]:
        """The tensors, for what is started now on the current stream."""
        if self._device.type == "cuda" and self._event is not None:
            self._reach(torch.cuda.current_stream(self._device), self._event)
        return self._tensors

    def _reach(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        if is_captured(self._device):  # a capture begins when all streams are idle, and may not wait for one outside
            _read_by_graphs.add(self)
        elif stream.cuda_stream not in self._streams:
            stream.wait_event(event)
            for tensor in self._tensors:
                tensor.record_stream(stream)
            self._streams.add(stream.cuda_stream)


class Shelf(Generic[T]):
    """The things that were asked for last, by key; what is made for a graph is there when it runs, and never kept.

    Args:
        size: how many things are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._things: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()  # backward runs one thread for each device

    def get(self, key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
        """What is kept under this key, else what `make` makes for `device`."""
        with self._lock:
            if (found := self._things.get(key)) is not None:
                self._things.move_to_end(key)
                return found
        made = make()
        if not is_captured(device):
            with self._lock:
                self._things[key] = made
                if len(self._things) > self._size:
                    self._things.popitem(last=False)
        return made

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._things.clear()
