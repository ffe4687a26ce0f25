"""One process group and the few calls that dlion makes: the only file, with voting.py (it makes groups), that uses
torch.distributed collectives.
"""

import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dlion.errors import ExchangeError, GroupNotReadyError
from dlion.layout import overwrite
from dlion.ops.bits import as_bytes
from dlion.roll_call import ATTENTION, RollCall, roll_call_of

BROADCAST_BYTES = 2**26  # of one broadcast call at start-up: bounds the extra memory

REPORT_BYTES = 2**26  # of one worker's JSON: the names of half a million tensors; bounds what a liar can ask for

DIRECT_BYTES = 2**16  # of a row told to every worker directly: what a 1 Gbit/s link carries in the time of a few hops

T = TypeVar("T")


def default_group(who: str) -> dist.ProcessGroup | None:
    """The default process group, or None where this is the only worker.

    Raises:
        GroupNotReadyError: WORLD_SIZE says that there are more workers, but no group exists.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    workers = os.environ.get("WORLD_SIZE", "1")
    if workers.strip() not in ("", "0", "1"):
        raise GroupNotReadyError(
            f"{who} was used with WORLD_SIZE={workers} but no process group exists, so every worker would train apart: "
            "call torch.distributed.init_process_group() before the first step"
        )
    return None


class Channel:
    """One process group, with the few calls that dlion makes. `group=None` is the default group.

    Every method but `during` and `wait_at_most` is a collective: all workers call it in the same order.

    Args:
        group: of the workers.
        phase: what its calls are for, where `during` does not say it: named when a worker does not arrive.
        roll_call: who asks then who is missing; None: the group's own.

    Raises:
        GroupNotReadyError: when there is no group.
        ExchangeError: from each method, when another worker is lost or does not come within the group's timeout.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, phase: str = "other calls", roll_call: RollCall | None = None
    ) -> None:
        group = group if group is not None else default_group("dlion.channel.Channel")
        if group is None:
            raise GroupNotReadyError("no process group exists: call torch.distributed.init_process_group() first")
        # held weakly: a group's threads must end in destroy_process_group(), not while the interpreter is taken down
        self._group = weakref.ref(group)
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.device = wire_device(group)
        self.roll_call = roll_call or roll_call_of(group)
        self._phase = phase

    @property
    def ranks(self) -> list[int]:
        """Of each worker in the default process group, as launchers know them: the names that errors use."""
        return self.roll_call.ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        group = self._group()
        if group is None:
            raise ExchangeError(
                "the process group was destroyed: call torch.distributed.init_process_group() and step() again"
            )
        return group

    def wait_at_most(self, limit: timedelta) -> None:
        """From now on calls wait so long for the others."""
        self.group.set_timeout(limit)

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Inside, calls are for this phase, and an error names it."""
        return self.roll_call.during(phase)

    def all_to_all(self, rows: Tensor) -> "Call[Tensor]":
        """Row j goes to worker j: T[size, width] -> T[size, width], row i from worker i."""
        received = torch.empty_like(rows)
        return self._call(lambda: dist.all_to_all_single(received, rows, group=self.group, async_op=True), received)

    def all_gather(self, row: Tensor) -> "Call[Tensor]":
        """T[width] -> T[size, width], every worker's row.

        Gloo passes rows around a ring, one flow on each link, hop after hop. Where hops and not bytes take the time, an
        all-to-all of equal rows sends the same bytes in one; with large rows its flows get in each other's way. Other
        backends know their own way, and two workers are a ring of one hop.
        """
        direct = self.device.type == "cpu" and self.size > 2 and nbytes(row) <= DIRECT_BYTES
        rows = row.repeat(self.size) if direct else row.contiguous()
        received = row.new_empty(self.size * row.numel())
        gather = dist.all_to_all_single if direct else dist.all_gather_single
        return self._call(
            lambda: gather(received, rows, group=self.group, async_op=True),
            received.view(self.size, row.numel()),
        )

    def gather(self, row: Tensor, to: int) -> "Call[Tensor | None]":
        """T[width] -> T[size, width] on worker `to`, None elsewhere."""
        received = row.new_empty((self.size, row.numel())) if self.rank == to else None
        parts = list(received) if received is not None else None
        return self._call(
            lambda: dist.gather(row.contiguous(), parts, group=self.group, group_dst=to, async_op=True),
            received,
        )

    def send_out(self, row: Tensor, source: int) -> "Call[Tensor]":
        """T[width] of worker `source` to everybody, directly: the others pass a row of the same width."""
        received = torch.empty_like(row)
        parts = [row.contiguous()] * self.size if self.rank == source else None
        return self._call(
            lambda: dist.scatter(received, parts, group=self.group, group_src=source, async_op=True),
            received,
        )

    def sum_(self, tensor: Tensor) -> "Call[Tensor]":
        """Sum over the workers, in place, by the backend's own all-reduce."""
        return self._call(lambda: dist.all_reduce(tensor, group=self.group, async_op=True), tensor)

    def broadcast_(self, tensors: list[Tensor], source: int = 0) -> None:
        """Overwrite `tensors` with worker `source`'s, any dtype and memory layout. Sizes must be equal everywhere."""
        for run in _runs(tensors, BROADCAST_BYTES):
            flat = torch.cat([as_bytes(t).to(self.device) for t in run])
            flat = self._call(
                partial(dist.broadcast, flat, group=self.group, async_op=True, group_src=source), flat
            ).wait()
            parts = torch.split(flat, [t.numel() * t.element_size() for t in run])
            for tensor, part in zip(run, parts, strict=True):
                # a clone, because a view as a wider dtype needs an aligned start
                overwrite(tensor, part.clone().view(tensor.dtype).view(tensor.shape))

    def gather_json(self, value: Any) -> list[Any]:
        """Every worker's `value`, in rank order, on every worker; JSON, never pickle. Two calls."""
        text = json.dumps(value).encode()
        told = self.all_gather(torch.tensor([len(text)], dtype=torch.int64, device=self.device)).wait()
        lengths: list[int] = told.view(-1).tolist()
        for rank, length in zip(self.ranks, lengths, strict=True):
            if not 0 < length <= REPORT_BYTES:
                raise ExchangeError(
                    f"rank {rank} announced a report of {length:,} bytes, and 1 to {REPORT_BYTES:,} are allowed: use "
                    "the same version of dlion everywhere, and look at what runs on that rank"
                )
        row = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        rows = self.all_gather(row).wait().cpu()
        return [
            told_by(rank, bytes(row[:length].tolist()))
            for rank, row, length in zip(self.ranks, rows, lengths, strict=True)
        ]

    def barrier(self) -> None:
        """Wait for all workers."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8, device=self.device)).wait()

    def _call(self, start: Callable[[], dist.Work], result: T) -> "Call[T]":
        began, place = time.monotonic(), self.roll_call.place(self._phase)
        with self.roll_call.naming_loss(place, began):
            return Call(start(), result, self.roll_call, place, began, self.device.type == "cpu")


@dataclass(frozen=True)
class Call(Generic[T]):
    """A collective call under way; it goes on by itself, and keeps its tensors alive.

    Attributes:
        place, began: what it is for, and when it began on the monotonic clock.
        blocks: whether waiting for it blocks this thread; on accelerators their queue waits instead.
    """

    work: dist.Work
    result: T
    roll_call: RollCall
    place: str
    began: float
    blocks: bool

    def arrived(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return bool(self.work.is_completed())

    def wait(self) -> T:
        """The result, once it is there.

        Raises:
            ExchangeError: another worker was lost, or did not come within the group's timeout; or it gave up already.
        """
        with self.roll_call.naming_loss(self.place, self.began):
            if self.blocks:
                self._attend()
            else:
                self.work.wait()
        return self.result

    def _attend(self) -> None:
        """Wait, and look now and then whether another worker has given up: it would never come."""
        while True:
            try:
                self.work.wait(timedelta(seconds=ATTENTION))
                return
            except RuntimeError:
                if self.work.is_completed():  # it failed, or came just now
                    self.work.wait()
                    return
            if self.roll_call.called():
                raise RuntimeError("another worker's call failed first")


def told_by(rank: int, text: bytes) -> Any:
    """The JSON value in what a worker sent.

    Raises:
        ExchangeError: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExchangeError(
            f"rank {rank} sent a report that is no JSON ({error}): use the same version of dlion everywhere, and look "
            "at what runs on that rank"
        ) from None


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _runs(tensors: list[Tensor], limit: int) -> Iterator[list[Tensor]]:
    run: list[Tensor] = []
    for tensor in tensors:
        if run and sum(map(nbytes, run)) + nbytes(tensor) > limit:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def wire_device(group: dist.ProcessGroup) -> torch.device:
    """Where rows must lie for this group: on an accelerator that it has a backend of its own for, else on the CPU.

    Gloo takes tensors of an accelerator through the CPU, so with Gloo alone they lie there at once.
    """
    try:
        backends = dist.get_backend_config(group).split(",")
    except (TypeError, ValueError, RuntimeError):  # torch.distributed does not know this group
        backends = [f"{device.type}:" for device in getattr(group, "_device_types", ())]
        backends = [] if "cpu:" in backends else backends
    kinds = [kind for kind, _, name in (each.partition(":") for each in backends) if kind != "cpu" and name != "gloo"]
    if not kinds:
        return torch.device("cpu")
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    return bound or torch.device(kinds[0], torch.accelerator.current_device_index())


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The group's own timeout: torch offers no public way to read it."""
    try:
        timeout: timedelta = group._get_backend(wire_device(group)).options._timeout
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout
    return timeout
