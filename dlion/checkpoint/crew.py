"""The workers of one optimizer as a checkpoint sees them: those that compute here, and a channel to the others."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dlion.channel import Channel
from dlion.errors import CheckpointError, ExchangeError, of_the_system
from dlion.optim import Distributed
from dlion.simulate import Simulation
from dlion.voting import checkpoint_channel


@dataclass(frozen=True)
class Crew:
    """All workers, some of whom are here: one of many, one alone, or all of a simulation."""

    size: int
    here: Sequence[int]
    channel: Channel | None

    @property
    def leads(self) -> bool:
        """Whether worker 0 is here, who does what is done once."""
        return 0 in self.here

    def told(self, act: Callable[[], Any]) -> list[Any]:
        """What `act` returned (JSON) in every process, in rank order. All processes must call it.

        Raises:
            CheckpointError: in every process, what went wrong in the first one in which something did.
        """
        cause: Exception | None = None
        answer: dict[str, Any]
        try:
            answer = {"value": act()}
        except ExchangeError:
            raise
        except Exception as error:
            cause = error
            answer = {"failed": reason_of(error)}
        answers = self.channel.gather_json(answer) if self.channel is not None else [json.loads(json.dumps(answer))]
        for rank, said in enumerate(answers):
            if "failed" in said:
                who = f"rank {rank}: " if self.size > 1 and self.channel is not None else ""
                raise CheckpointError(f"{who}{said['failed']}") from cause
        return [said["value"] for said in answers]


def crew_of(optimizer: Distributed, group: dist.ProcessGroup | Crew | None, timeout: timedelta | None) -> Crew:
    """The workers of an optimizer; where they are several processes, all must call it.

    Args:
        group: instead of the optimizer's own; or who is here and how many there are, without asking others.
        timeout: of waiting for the others; None: the optimizer's own.

    Raises:
        ExchangeError: a worker did not come. GroupNotReadyError: WORLD_SIZE is above 1 and there is no group.
    """
    if isinstance(group, Crew):
        return group
    if isinstance(optimizer, Simulation):
        return Crew(optimizer.workers, range(optimizer.workers), None)
    group = group or optimizer.membership.group("dlion.checkpoint", 1)
    if group is None or group.size() == 1:
        return Crew(1, (0,), None)
    channel = checkpoint_channel(group, timeout or optimizer.options.timeout)
    return Crew(channel.size, (channel.rank,), channel)


def reason_of(error: BaseException) -> str:
    """One sentence about an error: what the system said, where it did."""
    system = of_the_system(error)
    if system is not None and not isinstance(error, CheckpointError):
        return f"{system.strerror or system}{f': {system.filename}' if system.filename else ''}"
    said = " ".join(str(error).split())[:500].rstrip(".")
    return said if isinstance(error, (CheckpointError, ValueError)) else f"{type(error).__name__}: {said}"
