"""Votes while backward still runs: a bucket's ballots leave as soon as its gradients are there."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dlion.errors import OverlapError
from dlion.exchange import Exchange
from dlion.layout import Bucket, check_dense, local, named
from dlion.ops.bits import digest
from dlion.phases import Phases
from dlion.pipeline import Steps
from dlion.untraced import untraced

ACCUMULATE = "run every backward pass but the last of a step inside `with optimizer.accumulate():`"


class Overlap:
    """Watches the parameters of one optimizer, and sends buckets in the order that all workers share.

    Nothing here waits for other workers, so that backward may hold collectives of its own. What backward does not
    bring (unused parameters, the first step, whose agreement waits) is sent by `step()`.

    Args:
        begin: a method that returns the exchange to use in this step, begun, and how ballots are made; None while there
            is none to use.
        phases: times the ballots.
    """

    def __init__(self, begin: Callable[[], tuple[Exchange, Steps] | None], phases: Phases) -> None:
        self._begin = weakref.WeakMethod(begin)  # the optimizer owns this object
        self._phases = phases
        self._handles: list[RemovableHandle] = []
        self._finalizer = weakref.finalize(self, _remove, self._handles)
        self._lock = threading.Lock()  # backward runs one thread for each device
        self._accumulating = False
        self._buckets_of: list[list[int]] = []
        self._names: list[str] = []
        self.reset()

    def watch(self, exchange: Exchange) -> None:
        """Take up the parameters and buckets of `exchange`, in the place of earlier ones."""
        _remove(self._handles)
        replica = exchange.replica
        self._names = [name for _, _, name, param in named(replica.param_groups) if param.requires_grad]
        self._buckets_of = [[] for _ in replica.params]
        for bucket in exchange.layout.buckets:
            for piece in bucket.pieces:
                self._buckets_of[piece.slot].append(bucket.number)
        me = weakref.ref(self)
        self._handles = [
            param.register_post_accumulate_grad_hook(_hook(me, slot))  # type: ignore[no-untyped-call]
            for slot, param in enumerate(replica.params)
        ]
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _remove, self._handles)
        self.reset()

    def reset(self) -> None:
        """Begin to watch a new step."""
        self._using: tuple[Exchange, Steps] | None = None
        self._missing: dict[int, int] = {}  # bucket number -> pieces whose gradients are not there
        self._arrived: set[int] = set()  # slots whose gradients are
        self._left: set[int] = set()  # slots of which a ballot has left
        self._voted: dict[int, Tensor] = {}  # slot -> digest of the gradient as it was then

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, gradients are not complete yet, and no ballot leaves."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def check(self, exchange: Exchange) -> None:
        """Raise OverlapError, now or in a later step, if a gradient is not the one that this worker voted with.

        By value: DistributedDataParallel writes equal values again at the end of backward, and not every operation that
        changes a tensor counts its version up.
        """
        if not self._voted:
            return
        with self._phases("ballot"):
            grads = [exchange.replica.params[slot].grad for slot in self._voted]
            none = next(iter(self._voted.values())).new_empty(0)
            now = [digest(local(grad)) if grad is not None else none for grad in grads]
            exchange.refuse_changed([self._names[slot] for slot in self._voted], list(self._voted.values()), now)

    @untraced
    def gradient_is_there(self, slot: int) -> None:
        """What backward calls when it has accumulated a gradient."""
        if self._accumulating:
            return
        with self._lock:
            if not self._arrived:
                self._start()
            if slot in self._left:
                raise OverlapError(
                    f"the gradient of {self._names[slot]} was computed twice before step(), and overlap=True votes "
                    f"with the first: {ACCUMULATE}, call step() after each last one (a gradient scaler that skips "
                    "it needs overlap=False), or use overlap=False"
                )
            new = slot not in self._arrived  # a backward pass that failed half-way may be repeated
            self._arrived.add(slot)
            if self._using is not None and new:
                self._using[0].gradient_is_there()
                self._send(slot, *self._using)

    def _start(self) -> None:
        begin = self._begin()
        self._using = begin() if begin is not None else None
        self._missing = {}
        for numbers in self._buckets_of:
            for number in numbers:
                self._missing[number] = self._missing.get(number, 0) + 1

    @torch.no_grad()
    def _send(self, slot: int, exchange: Exchange, steps: Steps) -> None:
        check_dense(exchange.replica.params[slot])
        for number in self._buckets_of[slot]:
            self._missing[number] -= 1
        for bucket in exchange.unsent():
            if self._missing.get(bucket.number):
                break
            with self._phases("ballot"):
                self._remember(bucket, exchange)
                exchange.send(bucket, *steps.ballot(exchange.replica, bucket, exchange.moment))
        exchange.advance()

    def _remember(self, bucket: Bucket, exchange: Exchange) -> None:
        compared = exchange.compares_gradients()
        for piece in bucket.pieces:
            self._left.add(piece.slot)
            grad = exchange.replica.params[piece.slot].grad
            if compared and piece.slot not in self._voted and grad is not None:
                self._voted[piece.slot] = digest(local(grad))


def _hook(overlap: "weakref.ref[Overlap]", slot: int) -> Callable[[Tensor], None]:
    def gradient_is_there(param: Tensor) -> None:
        watching = overlap()
        if watching is not None:
            watching.gradient_is_there(slot)

    return gradient_is_there


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
