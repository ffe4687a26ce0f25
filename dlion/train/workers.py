"""Who computes in a run: this process as one worker of many, or all workers here, one after another.

The loop knows no more of it than `Workers` says, so simulated workers train by the same lines as real ones.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

import dlion
from dlion.channel import Channel
from dlion.simulate import Simulation
from dlion.train.config import Settled


class Stop(Protocol):
    """Whether a signal ends the run."""

    def reached(self, step: int) -> bool:
        """Whether to stop now, after `step`; asked after every step."""


class Trainees(Protocol):
    """What gradients and results are made of.

    Attributes:
        size: how many workers there are, all told.
        device, threads: of each worker.
        model: what they train, with the values of this process.
        optimizer: whose step ends everybody's.
    """

    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def threads(self) -> int: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> "dlion.Distributed": ...

    def turn(self, rank: int) -> AbstractContextManager[None]:
        """Inside, the model is that worker's, and its gradients start at None."""


class Workers(Trainees, Protocol):
    """All workers of a run, as this process sees them.

    Attributes:
        here: the ranks that compute in this process.
        stop: whether a signal ends the run.
    """

    @property
    def here(self) -> Sequence[int]: ...
    @property
    def stop(self) -> Stop: ...

    def gathered(self, mine: list[Any]) -> list[Any]:
        """One JSON value for each worker here -> one for each worker, in rank order."""

    def barrier(self) -> None:
        """Wait for the workers of other processes."""

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Inside, what workers wait for is this phase: an error names it when one does not come."""

    def synchronize_buffers(self) -> None:
        """Give all workers the same buffers."""


@dataclass(frozen=True)
class OneOfMany:
    """This process is one worker; the others are reached through a channel."""

    channel: Channel
    device: torch.device
    threads: int
    stop: Stop
    model: nn.Module
    optimizer: "dlion.Distributed"

    @property
    def size(self) -> int:
        return self.channel.size

    @property
    def here(self) -> Sequence[int]:
        return (self.channel.rank,)

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        self.model.zero_grad(set_to_none=True)
        yield

    def gathered(self, mine: list[Any]) -> list[Any]:
        return self.channel.gather_json(mine[0])

    def barrier(self) -> None:
        self.channel.barrier()

    def during(self, phase: str) -> AbstractContextManager[None]:
        return self.channel.during(phase)

    def synchronize_buffers(self) -> None:
        dlion.synchronize_buffers(self.model)


@dataclass(frozen=True)
class AllInOne:
    """All workers are simulated here."""

    device: torch.device
    threads: int
    stop: Stop
    model: nn.Module
    optimizer: Simulation

    @property
    def size(self) -> int:
        return self.optimizer.workers

    @property
    def here(self) -> Sequence[int]:
        return range(self.size)

    def turn(self, rank: int) -> AbstractContextManager[None]:
        return self.optimizer.worker(rank)

    def gathered(self, mine: list[Any]) -> list[Any]:
        return mine

    def barrier(self) -> None:
        pass

    def during(self, phase: str) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize_buffers(self) -> None:
        self.optimizer.synchronize_buffers()


class Place(Protocol):
    """Where a run's workers compute."""

    @property
    def device(self) -> torch.device: ...

    def workers(self, config: Settled, model: nn.Module) -> Workers:
        """The workers that train `model`; where they are several processes, it becomes rank 0's everywhere."""


def choices(config: Settled) -> dict[str, Any]:
    """The arguments of the optimizer that follow from the flags."""
    return {
        "method": config.method,
        "lr": config.lr,
        "betas": config.betas,
        "weight_decay": config.weight_decay,
        "ties": config.ties,
        "zeros": config.zeros,
        **config.settings,
    }
