"""Numbers that all workers tell each other beside their votes: how the answer is heard."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from dlion.channel import Channel
from dlion.stats import Stats

Rows = list[list[int]]  # of every worker, in rank order
Then = Callable[[Rows], None]


class Ask(Protocol):
    """Tells all workers some numbers and has `then` called with everybody's.

    Args:
        channel: to them, in a collective call for `phase`; None to hear the own ones alone.
        stats: counts the bytes as checks.
        numbers: i64[n], 63 bits each, on any device.
    """

    def __call__(self, channel: Channel | None, phase: str, numbers: Tensor, stats: Stats, then: Then) -> None: ...


def at_once(channel: Channel | None, phase: str, numbers: Tensor, stats: Stats, then: Then) -> None:
    """An `Ask` that waits for the answer."""
    then(told_to_all(channel, phase, numbers, stats).tolist())


def told_to_all(channel: Channel | None, phase: str | None, numbers: Tensor, stats: Stats) -> Tensor:
    """i64[n] -> i64[workers, n], every worker's; it is heard when somebody reads it. phase None: the one at hand."""
    if channel is None:
        return numbers[None]
    nbytes = numbers.numel() * numbers.element_size() * (channel.size - 1)
    stats.checked(nbytes, nbytes)
    with channel.during(phase) if phase is not None else nullcontext():
        return channel.all_gather(numbers.to(channel.device)).wait()


def row(numbers: list[int], device: torch.device | None = None) -> Tensor:
    """i64[n] of numbers that the host knows."""
    return torch.tensor(numbers, dtype=torch.int64, device=device or "cpu")
