"""Who is missing? The network library says that a call failed, and not because of whom: workers ask in the store.

A worker whose call fails posts where it stands in the process group's store and gives the others a short time to do the
same. Who waits for long looks there now and then, so all learn of it, whatever call they are in.
"""

import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from dlion.errors import DlionError, ExchangeError, ranks_text

GRACE = 2.5  # seconds that the others have to answer a roll call
ATTENTION = 0.5  # seconds of waiting between two looks whether somebody called one
POLL = 0.05  # seconds between two looks for answers

KEY = "dlion/roll"

CLOSED = re.compile("closed by peer|reset by peer|broken pipe", re.IGNORECASE)  # what the network library says then

T = TypeVar("T")


class StoreSilent(Exception):
    """The store does not answer."""


class Inquiry:
    """Questions to a store, asked by threads: one whose keeper is stopped never answers, whatever its timeouts say."""

    def __init__(self, find: Callable[[], Store]) -> None:
        self._find = find
        self._store: Store | None = None
        self._asking: threading.Thread | None = None

    def ask(self, question: Callable[[Store], T], seconds: float) -> T:
        """What `question` finds in the store.

        Raises:
            StoreSilent: nothing within `seconds`.
            RuntimeError: the store's own errors.
        """
        ends = time.monotonic() + seconds
        if self._asking is not None:  # the same connection answers one question after another
            self._asking.join(seconds)
            if self._asking.is_alive():
                raise StoreSilent
        answers: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                self._store = self._store or _own(self._find())
                answers.append(question(self._store))
            except Exception as error:
                errors.append(error)

        self._asking = threading.Thread(target=run, daemon=True, name="dlion store")
        self._asking.start()
        self._asking.join(max(ends - time.monotonic(), 0.0))
        if errors:
            raise errors[0]
        if not answers:
            raise StoreSilent
        return answers[0]


def _own(store: Store) -> Store:
    """A connection of its own, where this torch has such: where it hangs, those of others go on."""
    clone: Callable[[], Store] | None = getattr(store, "clone", None)
    return clone() if clone is not None else store


@dataclass(frozen=True)
class Roll:
    """Who answered and with what word, by rank (in a roll call: where it stands); and who did not."""

    present: dict[int, str]
    absent: list[int]


class RollCall:
    """The roll calls among the workers of one process group, and where this worker stands.

    Args:
        name: of what is done together; who gives up that gives up nothing else.

    Attributes:
        rank, size: of this worker among them, and how many they are. ranks: of each in the default process group, as
            launchers know it; errors name these.
        t: verdicts applied before the step at hand; None before the first.
    """

    def __init__(self, group: dist.ProcessGroup, name: str = "steps") -> None:
        self._key = f"{KEY}/{name}"
        self._group = weakref.ref(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.ranks = _ranks_of(group)
        self.t: int | None = None
        self._local = threading.local()  # a checkpoint may be written beside the steps
        self._taken = 0
        self._inquiry = Inquiry(self._store)

    @property
    def me(self) -> str:
        """Who this worker is, in words."""
        alike = self.ranks == list(range(self.size))
        return f"rank {self.ranks[self.rank]} of {self.size if alike else f'the group of {ranks_text(self.ranks)}'}"

    def _store(self) -> Store:
        group = self._group()
        store = group.get_group_store() if group is not None else None
        if store is None:
            raise RuntimeError("the process group has no store")
        return store

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, every call of this thread belongs to `phase`, whatever channel it goes through."""
        before = self._phase
        self._local.phase = phase
        try:
            yield
        finally:
            self._local.phase = before

    @property
    def _phase(self) -> str | None:
        return getattr(self._local, "phase", None)

    def place(self, phase: str) -> str:
        """Where this worker stands: the phase at hand, else that of the channel it uses, and t."""
        return (self._phase or phase) + (f" at t={self.t}" if self.t is not None else "")

    def called(self) -> bool:
        """Whether another worker calls the roll: its own call failed, and it will not take part in this one."""
        try:
            return bool(self._inquiry.ask(lambda store: store.check([f"{self._key}/{self._taken}"]), ATTENTION))
        except (StoreSilent, RuntimeError):
            return False

    def announce(self, key: str, timeout: float, word: str = "here", among: Sequence[int] | None = None) -> Roll:
        """Say that this worker is here, and wait for the others; who came within `timeout` seconds, with their words.

        Args:
            among: these workers alone; None: all.

        Raises:
            StoreSilent: the store does not answer.
            RuntimeError: the store's own errors.
        """
        everyone = {rank: f"{key}/{rank}" for rank in (range(self.size) if among is None else among)}

        def meet(store: Store) -> Roll:
            store.set(everyone[self.rank], word)
            absent = []
            try:
                store.wait(list(everyone.values()), timedelta(seconds=timeout))
            except RuntimeError:
                absent = [rank for rank, name in everyone.items() if not store.check([name])]
            came = {rank: name for rank, name in everyone.items() if rank not in absent}
            return Roll({rank: store.get(name).decode(errors="replace") for rank, name in came.items()}, absent)

        # asked by itself: checkpoints and steps may begin at once, and in another order elsewhere
        return Inquiry(self._store).ask(meet, timeout + GRACE)

    def take(self, place: str) -> Roll | None:
        """Say where this worker stands, and hear where the others do, within `GRACE`; None: the store is silent."""
        call, ends = f"{self._key}/{self._taken}", time.monotonic() + GRACE
        everyone = [f"{call}/{rank}" for rank in range(self.size)]
        self._taken += 1

        def post(store: Store) -> None:
            store.set(everyone[self.rank], place)
            store.set(call, place)

        def answers(store: Store) -> dict[int, str]:
            return {
                rank: store.get(key).decode(errors="replace") for rank, key in enumerate(everyone) if store.check([key])
            }

        present: dict[int, str] = {}
        pause = POLL
        try:
            self._inquiry.ask(post, GRACE)
            while len(present) < self.size:
                present = self._inquiry.ask(answers, max(ends - time.monotonic(), POLL))
                if (left := ends - time.monotonic()) <= 0:
                    break
                time.sleep(min(pause, left) if len(present) < self.size else 0)
                pause *= 1.5
        except (StoreSilent, RuntimeError):
            if not present:  # a keeper that gave up and went has told what it knew before
                return None
        return Roll(present, [rank for rank in range(self.size) if rank not in present])

    @contextmanager
    def naming_loss(self, place: str, began: float) -> Iterator[None]:
        """Turn the network library's errors into one that names the ranks that did not arrive.

        Args:
            place: as `place()` said when the call began, at `began` of the monotonic clock.
        """
        try:
            yield
        except (DlionError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            waited = time.monotonic() - began
            roll = self.take(place)
            raise ExchangeError(self._text(place, waited, roll, str(error).splitlines()[0])) from error

    def _text(self, place: str, waited: float, roll: Roll | None, reason: str) -> str:
        who = self.me
        advice = f"start again from the last checkpoint (network: {reason})"
        if roll is None:
            return (
                f"{who} lost another worker after {waited:.1f} s in {place}, and the process group's store, which "
                f"could say whom, does not answer: look for an error on the worker that keeps it, most often rank 0, "
                f"and {advice}"
            )
        others = {rank: where for rank, where in roll.present.items() if where != place}
        elsewhere = "".join(f"; rank {self.ranks[rank]} stands in {where}" for rank, where in sorted(others.items()))
        if not roll.absent:
            return f"{who} lost contact after {waited:.1f} s in {place}, though all workers answer{elsewhere}: {advice}"
        closed, first = "", "look for the first error there"
        if CLOSED.search(reason):  # by who died, gave up, or had no more data
            closed, first = ", when a connection was closed", f"{first} (a worker whose data ended needs torch's Join)"
        return (
            f"{who} lost another worker: {ranks_text([self.ranks[rank] for rank in roll.absent])} did not arrive "
            f"within {waited:.1f} s in {place}{closed}{elsewhere}: {first} and {advice}"
        )


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Of its workers, the ranks in the default process group; within `group` where torch knows no others."""
    try:
        return list(dist.get_process_group_ranks(group))
    except KeyError:  # made by hand, as those of elastic workers are
        return list(range(group.size()))


_roll_calls: "weakref.WeakKeyDictionary[dist.ProcessGroup, RollCall]" = weakref.WeakKeyDictionary()


def roll_call_of(group: dist.ProcessGroup) -> RollCall:
    """The one of this process group; dlion's own groups use that of the group they were made for."""
    return _roll_calls.setdefault(group, RollCall(group))
