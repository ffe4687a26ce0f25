"""Where an accelerator exchanges buckets while it computes: a stream beside the one that backward runs on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dlion.flight import Flight


class InLine:
    """Everything runs where it is started."""

    def begin(self) -> None:
        """A step begins: its gradients may belong to a graph, and must not wait for what does not."""

    def follow(self) -> None:
        """A gradient was made by the current stream: what is started there next comes after all gradients so far."""

    @contextmanager
    def taking(self, *tensors: Tensor) -> Iterator[None]:
        """Inside, what is started runs after all that the current stream was told so far, and reads these tensors."""
        yield

    def give(self, *tensors: Tensor) -> None:
        """The current stream, which reads these tensors, goes on after all that was started inside `taking`."""

    def sent(self, flight: Flight) -> None:
        """Ballots of one more bucket have left; inside `taking`."""

    def advance(self, flight: Flight) -> None:
        """Let buckets go on as far as the host need not wait."""
        flight.advance()


class Beside(InLine):
    """Buckets travel and are counted on a stream of their own.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._source: torch.Stream | None = None

    def begin(self) -> None:
        self._source = None

    def follow(self) -> None:
        current = self._current()
        if self._source is not None and self._source != current:
            current.wait_stream(self._source)
        self._source = current

    @contextmanager
    def taking(self, *tensors: Tensor) -> Iterator[None]:
        self._stream.wait_stream(self._current())
        for tensor in tensors:
            tensor.record_stream(self._stream)
        with self._stream:
            yield

    def give(self, *tensors: Tensor) -> None:
        current = self._current()
        current.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(current)

    def sent(self, flight: Flight) -> None:
        """Count the bucket before it, which waits on this stream and never on the host.

        So every worker starts its calls in one order, ballots of k + 1 before the verdict on k, whenever backward
        brings a gradient: two groups of NCCL that take turns on one device ask for that.
        """
        flight.count(but=1)

    def advance(self, flight: Flight) -> None:
        pass

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


def lane_for(overlap: bool, device: torch.device) -> InLine:
    """Beside what computes where both are to go on at once and the device has streams."""
    return Beside(device) if overlap and device.type != "cpu" else InLine()
