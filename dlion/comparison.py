"""Small numbers that all workers compare, and the first of them: hashes of gradients that should differ."""

import warnings
from typing import Any

import torch

from dlion.channel import Channel
from dlion.layout import local
from dlion.ops.bits import checksum
from dlion.replica import Replica
from dlion.stats import Stats

GUARDED_STEPS = 3  # steps whose gradients are compared, to find gradients that were averaged before


def gathered(channel: Channel, numbers: list[int], stats: Stats) -> list[list[int]]:
    """Every worker's `numbers`, 63 bits each, in rank order; one call, counted as a check."""
    row = torch.tensor(numbers, dtype=torch.int64, device=channel.device)
    nbytes = row.numel() * row.element_size() * (channel.size - 1)
    stats.checked(nbytes, nbytes)
    rows: list[list[int]] = channel.all_gather(row).wait().tolist()
    return rows


def told(channel: Channel, value: Any, stats: Stats) -> list[Any]:
    """Every worker's `value`, of any length as JSON, in rank order; two calls, counted as a check."""
    everyone = channel.gather_json(value)
    sizes = [len(str(said)) for said in everyone]  # near enough: these bytes only have to be kept apart
    stats.checked(sizes[channel.rank], sum(sizes) - sizes[channel.rank])
    return everyone


class Guard:
    """Finds out in the first steps whether gradients had been averaged already: then nothing is saved.

    Args:
        channel: to the other workers; None for one worker alone.
        stats: counts what is moved.
    """

    def __init__(self, channel: Channel | None, stats: Stats) -> None:
        self._channel, self._stats = channel, stats
        self._steps = 0
        self._averaged = True

    def look(self, replica: Replica) -> None:
        """Compare the gradients of a step; a collective call in the first steps. Who rests has none to compare."""
        if self._channel is None or self._steps >= GUARDED_STEPS:
            return
        grads = [] if replica.resting else [local(param.grad) for param in replica.params if param.grad is not None]
        with self._channel.during("comparing gradients"):
            hashes = gathered(self._channel, [checksum(grads) >> 1], self._stats)
        self._averaged = self._averaged and hashes[0] != [0] and all(value == hashes[0] for value in hashes)
        self._steps += 1
        if self._steps == GUARDED_STEPS and self._averaged:
            warnings.warn(
                f"gradients were equal on all {self._channel.size} workers in the first {GUARDED_STEPS} steps, so they "
                "seem to be averaged already, or all workers read the same data: votes then carry no information; call "
                "dlion.local_gradients(model) on the DDP module to switch averaging off (a framework that wraps models "
                "itself: docs/integrations says how), or give ranks their own data",
                stacklevel=9,  # whoever called step()
            )
