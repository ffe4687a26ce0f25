"""The workers of one optimizer as a checkpoint sees them: those that compute here, and a channel to the others."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dlion.channel import Channel, default_group, timeout_of
from dlion.checkpoint.mesh import ranks_of_mesh, ranks_of_worker
from dlion.elastic.elastic import Elastic
from dlion.errors import CheckpointError, ExchangeError, of_the_system
from dlion.optim import Distributed
from dlion.quoting import one_line
from dlion.sharding import check_shards, ranks_of_shards, trained
from dlion.simulate import Simulation
from dlion.voting import checkpoint_channel, gathering

WHO = "dlion.checkpoint"
STRAY = timedelta(seconds=10)  # for others to come and hear that this worker stands outside
SHOWN = 1000  # letters of what went wrong on a worker


@dataclass(frozen=True)
class Crew:
    """All workers, some of whom are here: one of many, a shard of one, one alone, or all of a simulation.

    Attributes:
        channel: to the other processes.
        patience: how long each call through `channel` waits for the others.
        shards: processes of each worker. shard: which of them this is. first: the lowest of their ranks.
    """

    size: int
    here: Sequence[int]
    channel: Channel | None
    patience: timedelta | None = None
    shards: int = 1
    shard: int = 0
    first: int | None = None

    @property
    def leads(self) -> bool:
        """Whether worker 0 is here (of several, its first process), who does what is done once."""
        return 0 in self.here and self.shard == 0

    @property
    def ranks(self) -> list[int]:
        """Of the processes, in the default process group, in the order in which `told` answers."""
        return self.channel.ranks if self.channel is not None else [0]

    @property
    def seat(self) -> list[int]:
        """Which shard of which worker is here, and of how many: [worker, shard, first, workers, shards]."""
        return [self.here[0], self.shard, self.here[0] if self.first is None else self.first, self.size, self.shards]

    def number(self, worker: int) -> int:
        """Of the process here that computes for `worker`: among all that do for any."""
        return worker * self.shards + self.shard

    def told(self, call: str, act: Callable[[], Any]) -> list[Any]:
        """What `act` returned (JSON) in every process, in rank order. All processes must call it.

        Args:
            call: of the caller: what all processes must be in.

        Raises:
            CheckpointError: in every process, what went wrong in the first one in which something did.
        """
        cause: Exception | None = None
        answer: dict[str, Any]
        try:
            answer = {"call": call, "value": act()}
        except ExchangeError:
            raise
        except Exception as error:
            cause = error
            answer = {"call": call, "failed": reason_of(error)}
        answers = self.channel.gather_json(answer) if self.channel is not None else [json.loads(json.dumps(answer))]
        for rank, said in zip(self.ranks, answers, strict=True):
            if said["call"] != answers[0]["call"]:
                raise CheckpointError(
                    f"rank {rank} is in {one_line(str(said['call']), SHOWN)}() and rank {self.ranks[0]} in "
                    f"{one_line(str(answers[0]['call']), SHOWN)}(): all workers call the same, in the same order"
                )
        for rank, said in zip(self.ranks, answers, strict=True):
            if "failed" in said:
                who = f"rank {rank}: " if self.channel is not None else ""
                raise CheckpointError(f"{who}{one_line(str(said['failed']), SHOWN)}") from cause
        return [said["value"] for said in answers]


ALONE = Crew(1, (0,), None)


def crew_of(optimizer: Any, group: Any, timeout: timedelta | None, *, loading: bool) -> Crew:
    """The workers of an optimizer; where they are several processes, all must call it.

    Where an argument is no good it finds the other workers all the same, if there is a way: they must hear of it.

    Args:
        group: instead of the optimizer's own; or who is here and how many there are, without asking others.
        timeout: of waiting for the others; None: the optimizer's own.
        loading: an elastic worker loads by itself: the others may be training already, or not be there yet.

    Raises:
        ExchangeError: a worker did not come. GroupNotReadyError: WORLD_SIZE is above 1 and there is no group.
        CheckpointError: an elastic optimizer is in no round.
    """
    if isinstance(group, Crew):
        return group
    if isinstance(optimizer, Simulation):
        return Crew(optimizer.workers, range(optimizer.workers), None)
    if isinstance(optimizer, Elastic) and loading and not isinstance(group, dist.ProcessGroup):
        return Crew(optimizer.terms.workers, (optimizer.terms.worker,), None)
    parent = _group_of(optimizer, group)
    if parent is None:
        return ALONE
    own = optimizer.options.timeout if isinstance(optimizer, Distributed) else None
    patience = timeout or own or timeout_of(parent)
    if _is_outside(group):
        patience = min(patience, STRAY)
    mine = ranks_of_worker(optimizer.param_groups, parent) if isinstance(optimizer, Distributed) else [parent.rank()]
    if not mine:
        parent = default_group(WHO)  # there all hear what is wrong
    assert parent is not None
    if len(mine) > 1:
        everyone = gathering(ranks_of_mesh(dist.get_process_group_ranks(parent), mine), patience)
        channel = checkpoint_channel(everyone, patience)
        shard = mine.index(dist.get_rank())
        return Crew(parent.size(), (parent.rank(),), channel, patience, len(mine), shard, min(mine))
    if parent.size() == 1:
        return ALONE
    channel = checkpoint_channel(parent, patience)
    return Crew(channel.size, (channel.rank,), channel, patience)


def check_workers(optimizer: Distributed, group: Any) -> None:
    """Raise a ValueError where the workers are not those that hold equal shards of the optimizer's parameters.

    Args:
        group: instead of the optimizer's own.
    """
    params = list(trained(optimizer.param_groups))
    if ranks_of_shards(params) and not isinstance(group, Crew):
        check_shards(params, _group_of(optimizer, group))


def _group_of(optimizer: Any, given: Any) -> dist.ProcessGroup | None:
    """The process group of the workers, None for one alone."""
    if isinstance(given, dist.ProcessGroup):
        return given
    if isinstance(optimizer, Elastic):
        if not optimizer.workers_here or not optimizer.rounds.round:
            raise CheckpointError("an elastic optimizer finds its workers in step(): save after one")
        return optimizer.rounds.group
    if isinstance(optimizer, Distributed) and not optimizer.membership.lost:
        return optimizer.membership.group(WHO, 1)
    return default_group(WHO)


def _is_outside(given: Any) -> bool:
    """Whether it is what torch gives a worker that is not in a group: perhaps nobody waits for that worker."""
    return type(given) is int and given == dist.GroupMember.NON_GROUP_MEMBER


def reason_of(error: BaseException) -> str:
    """One sentence about an error: what the system said, where it did."""
    system = of_the_system(error)
    if system is not None and not isinstance(error, CheckpointError):
        return f"{system.strerror or system}{f': {system.filename}' if system.filename else ''}"
    said = one_line(str(error), SHOWN).rstrip(".")
    return said if isinstance(error, (CheckpointError, ValueError)) else f"{type(error).__name__}: {said}"
