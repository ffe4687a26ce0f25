"""dlion's own groups for each group of workers: made once, when all workers have come."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from dlion.channel import Channel, timeout_of
from dlion.errors import ExchangeError, ranks_text
from dlion.roll_call import RollCall, StoreSilent, roll_call_of
from dlion.sharding import ranks_of_shards

MakeGroup = Callable[[str], dist.ProcessGroup]


@dataclass(frozen=True)
class Purpose:
    """What workers meet for, and what to look for where one does not come, in words."""

    what: str
    advice: str


AGREEMENT = Purpose("begin their agreement", "look for an error there, or raise timeout=")
SAVING = Purpose(
    "call dlion.checkpoint.save or load",
    "call it on every worker and not on rank 0 alone, with a folder that all of them see, or look for an error there, "
    "or raise timeout=",
)
SHARED = 0  # the number of the pair that every optimizer uses whose calls never overlap with another's


@dataclass(frozen=True)
class Voting:
    """dlion's own two groups for one parent group: ballots and verdicts never interleave with the caller's calls."""

    ballots: Channel
    verdicts: Channel
    rounds: list[int]  # how many agreements were begun here; one number, held in a list so that it can grow


_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[float | None, int], Voting]]"
_made = weakref.WeakKeyDictionary()
_owned: "weakref.WeakKeyDictionary[object, weakref.WeakKeyDictionary[dist.ProcessGroup, Voting]]"
_owned = weakref.WeakKeyDictionary()
_saving: "weakref.WeakKeyDictionary[dist.ProcessGroup, Channel]" = weakref.WeakKeyDictionary()
_gatherings: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]"
_gatherings = weakref.WeakKeyDictionary()
_makers: "weakref.WeakKeyDictionary[dist.ProcessGroup, MakeGroup]" = weakref.WeakKeyDictionary()


def adopt(parent: dist.ProcessGroup, make: MakeGroup) -> None:
    """Make dlion's groups over the workers of `parent`, who have met, by `make(name)`, which keeps them alive."""
    _makers[parent] = make


def voting_groups(parent: dist.ProcessGroup, timeout: timedelta | None, owner: object = None) -> Voting:
    """The two groups over the workers of `parent`, made at first use.

    Args:
        timeout: seconds that calls wait; None: the parent group's own.
        owner: None shares one pair for each (parent, timeout), which is enough while no two exchanges are under way at
            once. Otherwise a pair for this object alone, which lives until the process group is destroyed. Workers
            must ask for their pairs in the same order.

    Raises:
        ExchangeError: names the ranks that have not come within `timeout`.
    """
    if owner is None:
        return _pair(parent, timeout, SHARED)
    owned = _owned.setdefault(owner, weakref.WeakKeyDictionary())
    if parent not in owned:
        owned[parent] = _pair(parent, timeout, 1 + max((number for _, number in _made.get(parent, {})), default=SHARED))
    return owned[parent]


def checkpoint_channel(parent: dist.ProcessGroup, timeout: timedelta) -> Channel:
    """A third group, for checkpoints alone: they are written while ballots and verdicts travel. Made at first use.

    It is always Gloo's: what it carries lies on the CPU. There is one whatever the timeouts are that workers gave: who
    gave one that is no good must reach the others.

    Args:
        timeout: seconds to wait for the others where it is made; `wait_at_most` says how long calls wait.

    Raises:
        ExchangeError: names the ranks that have not come within `timeout`.
    """
    if parent not in _saving:
        if parent not in _makers:
            _meet(parent, "dlion/checkpoint", timeout, SAVING)
        make = _makers.get(parent) or _by_torch(parent, timeout, "gloo")
        # calls of a thread beside training: where that stands is none of its business
        _saving[parent] = Channel(make("dlion checkpoint"), "checkpoint", RollCall(parent, "checkpoint"))
    return _saving[parent]


def siblings(params: Iterable[tuple[str, Tensor]], timeout: timedelta | None) -> Channel | None:
    """To the ranks that hold the other shards of these parameters; None where they are whole. All of them call it."""
    ranks = ranks_of_shards(params)
    if len(ranks) < 2:
        return None
    everyone = dist.group.WORLD
    assert everyone is not None
    return voting_groups(gathering(sorted(ranks), timeout or timeout_of(everyone)), timeout).ballots


def gathering(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    """The process group of these ranks, this one among them: the default one if that is theirs, else made at first use.

    Raises:
        ExchangeError: not all came within `timeout`.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    members = tuple(ranks)
    if len(members) == everyone.size():
        return everyone
    made = _gatherings.setdefault(everyone, {})
    if members not in made:
        _meet(everyone, f"dlion/gathering/{members}", timeout, SAVING, among=members)
        group = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        made[members] = group
    return made[members]


def _pair(parent: dist.ProcessGroup, timeout: timedelta | None, number: int) -> Voting:
    key = (timeout.total_seconds() if timeout else None, number)
    made = _made.setdefault(parent, {})
    if key not in made:
        if parent not in _makers:
            _meet(parent, f"dlion/groups/{key}", timeout)
        make, roll = _makers.get(parent) or _by_torch(parent, timeout), roll_call_of(parent)
        with roll.naming_loss(roll.place("making groups"), time.monotonic()):
            ballots, verdicts = make(f"dlion ballots {key}"), make(f"dlion verdicts {key}")
        made[key] = Voting(Channel(ballots, "ballots", roll), Channel(verdicts, "verdicts", roll), [0])
    return made[key]


def _by_torch(parent: dist.ProcessGroup, timeout: timedelta | None, backend: str | None = None) -> MakeGroup:
    limit = timeout or timeout_of(parent)
    ranks = dist.get_process_group_ranks(parent)
    backend = backend or dist.get_backend_config(parent)

    def make(name: str) -> dist.ProcessGroup:
        with _made_by_members_alone(parent):
            group = dist.new_group(
                ranks, timeout=limit, backend=backend, use_local_synchronization=True, group_desc=name
            )
        assert isinstance(group, dist.ProcessGroup)
        return group

    return make


@contextmanager
def _made_by_members_alone(parent: dist.ProcessGroup) -> Iterator[None]:
    """Inside, torch makes groups of these workers without the others.

    Where the default group is bound to a device, torch splits NCCL's communicator of all ranks, in a call that all of
    them would have to make, and those who vote would wait for it.
    """
    everyone = dist.group.WORLD
    bound = getattr(everyone, "bound_device_id", None)
    if everyone is None or bound is None or parent.size() == everyone.size():
        yield
        return
    everyone.bound_device_id = None
    try:
        yield
    finally:
        everyone.bound_device_id = bound


def _meet(
    parent: dist.ProcessGroup,
    key: str,
    timeout: timedelta | None,
    purpose: Purpose = AGREEMENT,
    among: Sequence[int] | None = None,
) -> None:
    """Wait until all workers (`among`: these) have come to make a group, each a member of as many groups as any other.

    torch names a group after its ranks and the number of groups that the process is a member of, and workers that name
    it differently wait for each other until the timeout.

    Raises:
        ExchangeError: names the ranks that have not come within `timeout` (None: the group's own).
    """
    here = _groups_here()
    most = max(map(int, wait_for_all(parent, key, timeout, str(here), purpose, among).values()))
    for _ in range(most - here):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True, group_desc="dlion: one alone")


def _groups_here() -> int:
    """Of how many process groups this process is a member."""
    try:
        return len(dist.distributed_c10d._world.pg_names)
    except AttributeError:  # a torch that keeps them elsewhere; test_processes.py sees whether it names groups alike
        return 0


def wait_for_all(
    group: dist.ProcessGroup,
    key: str,
    timeout: timedelta | None,
    word: str = "here",
    purpose: Purpose = AGREEMENT,
    among: Sequence[int] | None = None,
) -> dict[int, str]:
    """Announce this worker under `key` in the group's store and wait for the others; the words of all, by rank.

    Args:
        among: wait for these alone, this worker one of them.

    Raises:
        ExchangeError: names the ranks that have not come within `timeout` (None: the group's own).
    """
    seconds = (timeout or timeout_of(group)).total_seconds()
    calls = roll_call_of(group)
    everyone = f"all {calls.size} workers" if among is None else ranks_text(list(among))
    try:
        roll = calls.announce(key, seconds, word, among)
    except (StoreSilent, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else "no answer"
        raise ExchangeError(
            f"{calls.me} lost the process group's store while waiting {seconds:g} s for "
            f"{everyone} to {purpose.what}: "
            f"look for an error on the worker that keeps it, most often rank 0 (network: {reason})"
        ) from error
    if roll.absent:
        raise ExchangeError(
            f"{calls.me} waited {seconds:g} s for {everyone} to {purpose.what}, and "
            f"{ranks_text([calls.ranks[rank] for rank in roll.absent])} did not come: {purpose.advice}"
        )
    return roll.present
