"""The workers that train together at the moment: a round, its process groups, and how they are made anew."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store

from dlion.channel import Channel
from dlion.elastic.address import host_and_port
from dlion.elastic.quorum import Lighthouse, Member, workers_text
from dlion.elastic.standing import HASH_BITS, Standing, next_round
from dlion.errors import ExchangeError, QuorumError
from dlion.voting import adopt, checkpoint_channel, voting_groups, wait_for_all

MEETING_SECONDS = 10.0  # for members to come from the lighthouse to the store of one, and for each connection there:
# who died on the way never comes; one whose store is gone is noticed at once
KNOCK_SECONDS = 3.0  # for one attempt to reach that store, and for its answers, which come at once or never
ASK_AGAIN_SECONDS = 0.1  # while some workers of a run that begins have not come


@dataclass(frozen=True)
class Patience:
    """How long a worker waits, in seconds.

    Attributes:
        call: for the others in each call of the network, and to connect to them.
        quorum: at the lighthouse for enough workers.
        start: for all workers, when none of those that have come trained before; then for enough of them.
    """

    call: float
    quorum: float
    start: float


class Rounds:
    """This worker among those of its round.

    Args:
        lighthouse: where quorums are found.
        workers: how many there are when all are there; min_workers: with fewer nobody trains.
        patience: how long to wait.

    Attributes:
        round: number of the round, 0 while in none.
        seen: the greatest number of a round that this worker, or who told it, has seen.
        members: of the round, lowest worker first; rank: this worker among them.
        group: their process group, None for one worker alone.
    """

    def __init__(self, lighthouse: Lighthouse, workers: int, min_workers: int, patience: Patience) -> None:
        self.lighthouse = lighthouse
        self.workers = workers
        self.min_workers = min_workers
        self.patience = patience
        self.round = self.seen = 0
        self.members: list[Member] = []
        self.rank = 0
        self.group: dist.ProcessGroup | None = None
        self._channel: Channel | None = None
        self._backends: list[dist.ProcessGroupGloo] = []
        self._kept: list[dist.ProcessGroup] = []
        self._been_in_one = False
        self._born = time.monotonic()
        self._host = _own_host(lighthouse.address)
        timeout = timedelta(seconds=patience.call)
        self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=timeout)

    @property
    def numbers(self) -> list[int]:
        """The workers of the round."""
        return [member.worker for member in self.members]

    def renew(self) -> bool:
        """Ask for a quorum; whether it made a new round, whose process groups are then ready.

        Every member decides by what the quorum says of all of them, so all decide alike: a round goes on only while
        its members are the same and all of them still hold its connections.

        Raises:
            QuorumError: too few workers are there.
            ExchangeError: a member of the new round was lost before everybody had connected to it.
        """
        members = self._quorum()
        names = [member.name for member in members]
        intact = {member.told["round"] for member in members} == {self.round} and self.round
        if intact and names == [member.name for member in self.members]:
            return False
        self.part()
        self.members, self.rank = members, names.index(self.lighthouse.name)
        self.seen = next_round([member.told["seen"] for member in members], names)
        self._been_in_one = True
        self._connect(self.seen)
        self.round = self.seen
        return True

    def gather(self, standing: Standing) -> list[Standing]:
        """Every member's standing, in rank order.

        Raises:
            ExchangeError: a member was lost; others may have received all standings.
        """
        if self._channel is None:
            return [Standing.decode(standing.encode())]
        return [Standing.decode(row) for row in self._channel.all_gather(standing.encode()).wait()]

    @property
    def leader(self) -> int | None:
        """The lowest worker among those who trained before this round began, or among all where nobody did."""
        elders = [member.worker for member in self.members if member.told["been"]]
        return min(elders or self.numbers, default=None)

    @property
    def channel(self) -> Channel | None:
        """To all members, for what they say beside votes; None for one worker alone."""
        return self._channel

    def part(self) -> None:
        """Close the connections of the round, so that nobody in it waits for this worker."""
        for backend in self._backends:
            backend.abort()
        self._backends.clear()
        self._kept.clear()
        self.group = self._channel = None
        self.round = 0

    def leave(self) -> None:
        """Part, and be forgotten by the lighthouse."""
        self.part()
        self.lighthouse.close()

    def _quorum(self) -> list[Member]:
        store = f"{self._host}:{self._store.port}"
        until = time.monotonic() + self.patience.quorum
        pause = threading.Event()
        while True:
            waits = time.monotonic() - self._born < self.patience.start
            told = {"round": self.round, "seen": self.seen, "been": self._been_in_one, "waits": waits}
            members = self.lighthouse.quorum(store, told, max(0.1, until - time.monotonic()))
            waiting = any(member.told["waits"] for member in members) and not any(m.told["been"] for m in members)
            wanted = self.workers if waiting else self.min_workers
            if len(members) >= wanted:
                return members
            if time.monotonic() > until:
                raise QuorumError(
                    f"only {workers_text([member.worker for member in members])} came within "
                    f"{self.patience.quorum:g} s and {wanted} are needed: start the others, or allow fewer with "
                    "min_workers="
                )
            pause.wait(ASK_AGAIN_SECONDS)

    def _connect(self, number: int) -> None:
        size = len(self.members)
        if size == 1:
            return
        timeout = timedelta(seconds=self.patience.call)
        meeting = min(timeout, timedelta(seconds=MEETING_SECONDS))
        try:
            store = PrefixStore(f"dlion/{number}", _store_of(self.members[0], meeting.total_seconds()))
            group = dist.ProcessGroup(PrefixStore("all", store), self.rank, size)
            wait_for_all(group, "come", meeting)
            adopt(group, self._maker(store, meeting, timeout))
            self._kept.append(group)
            self._channel = voting_groups(group, timeout).ballots
            checkpoint_channel(group, timeout)  # now: later some may be lost, and those who save would wait for them
        except (RuntimeError, OSError) as error:
            self.part()
            raise ExchangeError(
                f"worker {self.members[self.rank].worker} could not connect to {workers_text(self.numbers)} within "
                f"{meeting.total_seconds():g} s: {str(error).splitlines()[0]}"
            ) from error
        self.group = group

    def _maker(self, store: Store, meeting: timedelta, timeout: timedelta) -> Callable[[str], dist.ProcessGroup]:
        """Makes groups whose members connect within `meeting`, and wait for each other's calls for `timeout`."""

        def make(name: str) -> dist.ProcessGroup:
            prefixed = PrefixStore(name, store)
            group = dist.ProcessGroup(prefixed, self.rank, len(self.members))
            backend = dist.ProcessGroupGloo(PrefixStore("gloo", prefixed), self.rank, len(self.members), meeting)
            backend._set_default_timeout(timeout)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._set_group_name(GroupName(f"{name} of round {self.seen >> HASH_BITS}"))
            self._backends.append(backend)
            self._kept.append(group)
            return group

        return make


def _store_of(keeper: Member, seconds: float) -> TCPStore:
    """A connection to the store that a member keeps, which listened before it came to the lighthouse.

    torch's client knocks at a closed door until its time is up: so it is asked for a short time only, and whether
    somebody listens still is found out between.

    Raises:
        ConnectionRefusedError: nobody does: the keeper is dead. RuntimeError: no answer within `seconds`.
    """
    host, _, port = keeper.store.rpartition(":")
    ends = time.monotonic() + seconds
    while True:
        socket.create_connection((host, int(port)), seconds).close()
        try:
            return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=min(KNOCK_SECONDS, seconds)))
        except RuntimeError:
            if time.monotonic() > ends:
                raise


def _own_host(lighthouse: str) -> str:
    """The address by which workers that reach the lighthouse reach this one: that of the interface towards it."""
    host, port = host_and_port(lighthouse)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])
