"""dlion's own two groups for each group of workers: made once, when all workers have come."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from dlion.channel import Channel, ranks_text, timeout_of
from dlion.errors import ExchangeError


@dataclass(frozen=True)
class Voting:
    """dlion's own two groups for one parent group: ballots and verdicts never interleave with the caller's calls."""

    ballots: Channel
    verdicts: Channel
    rounds: list[int]  # how many agreements were begun here; one number, held in a list so that it can grow


_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float | None, Voting]]" = weakref.WeakKeyDictionary()


def adopt(
    parent: dist.ProcessGroup,
    ballots: dist.ProcessGroup,
    verdicts: dist.ProcessGroup,
    timeout: timedelta | None = None,
) -> None:
    """Vote over groups that exist already, where voting over `parent` with this `timeout` would make them."""
    seconds = timeout.total_seconds() if timeout else None
    _made.setdefault(parent, {})[seconds] = Voting(Channel(ballots), Channel(verdicts), [0])


def voting_groups(parent: dist.ProcessGroup, timeout: timedelta | None) -> Voting:
    """The two groups over the workers of `parent`, made once for each (parent, timeout) and shared by all optimizers.

    Waits first until every worker of `parent` has come.

    Raises:
        ExchangeError: names the ranks that have not come within `timeout` (None: the parent group's own).
    """
    seconds = timeout.total_seconds() if timeout else None
    made = _made.setdefault(parent, {})
    if seconds not in made:
        wait_for_all(parent, f"dlion/groups/{seconds}", timeout)
        limit = timeout or timeout_of(parent)
        ranks = dist.get_process_group_ranks(parent)
        backend = dist.get_backend_config(parent)
        pair = [
            dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=True, group_desc=desc)
            for desc in ("dlion ballots", "dlion verdicts")
        ]
        made[seconds] = Voting(Channel(pair[0]), Channel(pair[1]), [0])
    return made[seconds]


def wait_for_all(group: dist.ProcessGroup, key: str, timeout: timedelta | None) -> None:
    """Announce this worker under `key` in the group's store and wait for the others.

    Raises:
        ExchangeError: names the ranks that have not come within `timeout` (None: the group's own).
    """
    timeout = timeout or timeout_of(group)
    store, rank, size = group.get_group_store(), group.rank(), group.size()
    everyone = [f"{key}/{other}" for other in range(size)]
    try:
        store.set(everyone[rank], "here")
        store.wait(everyone, timeout)
    except RuntimeError as error:
        absent = _absent(store.check, everyone)
        if absent is None:
            raise ExchangeError(
                f"rank {rank} lost the process group's store while waiting for all {size} workers to begin: look for "
                f"an error on the worker that keeps it, most often rank 0 (network: {str(error).splitlines()[0]})"
            ) from error
        raise ExchangeError(
            f"rank {rank} waited {timeout.total_seconds():g} s for all {size} workers to begin, and "
            f"{ranks_text(absent)} did not come: look for an error there, or raise timeout="
        ) from error


def _absent(check: Callable[[list[str]], bool], everyone: list[str]) -> list[int] | None:
    """The ranks whose keys are missing; None if the store does not answer."""
    try:
        return [rank for rank, key in enumerate(everyone) if not check([key])]
    except RuntimeError:
        return None
