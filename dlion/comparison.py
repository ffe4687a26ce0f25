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
ORPHANED = -1  # stands for the hash of gradients where no parameter has one
WITHOUT_GRADIENTS = (
    f"no parameter of the optimizer had a gradient on any worker in the first {GUARDED_STEPS} steps, so nothing is "
    "trained: call fully_shard(model), and whatever else replaces a model's parameters, before the optimizer is made, "
    "and backward() before step()"
)


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
    """Finds out in the first steps whether gradients had been averaged already, or whether there are none at all.

    Args:
        channel: to the other workers; None for one worker alone.
        stats: counts what is moved.
    """

    def __init__(self, channel: Channel | None, stats: Stats) -> None:
        self._channel, self._stats = channel, stats
        self._steps = 0
        self._averaged = self._orphaned = True

    def look(self, replica: Replica) -> None:
        """Compare the gradients of a step; a collective call in the first steps. Who rests has none to compare."""
        if self._steps >= GUARDED_STEPS:
            return
        hashes = self._hashes(replica)
        self._orphaned = self._orphaned and bool(replica.params) and all(value == [ORPHANED] for value in hashes)
        equal = hashes[0] not in ([0], [ORPHANED]) and all(value == hashes[0] for value in hashes)
        self._averaged = self._averaged and len(hashes) > 1 and equal
        self._steps += 1
        if self._steps == GUARDED_STEPS and (self._orphaned or self._averaged):
            # whoever called step()
            warnings.warn(WITHOUT_GRADIENTS if self._orphaned else _averaged_among(len(hashes)), stacklevel=9)

    def _hashes(self, replica: Replica) -> list[list[int]]:
        """Of all workers' gradients."""
        grads = [local(param.grad) for param in replica.params if param.grad is not None]
        if self._channel is None:
            return [[0 if grads else ORPHANED]]
        own = (checksum([] if replica.resting else grads) >> 1) if grads else ORPHANED
        with self._channel.during("comparing gradients"):
            return gathered(self._channel, [own], self._stats)


def _averaged_among(workers: int) -> str:
    return (
        f"gradients were equal on all {workers} workers in the first {GUARDED_STEPS} steps, so they "
        "seem to be averaged already, or all workers read the same data: votes then carry no information; call "
        "dlion.local_gradients(model) on the DDP module to switch averaging off (a framework that wraps models "
        "itself: docs/integrations says how), or give ranks their own data"
    )
