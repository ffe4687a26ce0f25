"""The exchange of the step at hand: kept while group, layout and state are those agreed, else renewed or made anew."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dlion import apart
from dlion.channel import wire_device
from dlion.errors import OverlapError
from dlion.exchange import Exchange
from dlion.layout import layout_key
from dlion.methods import METHODS, Choices
from dlion.options import check_parameters
from dlion.overlap import Overlap
from dlion.pipeline import Steps
from dlion.resident.choice import kernels_for, refuse_new_in_graph, resides
from dlion.resident.exchange import ResidentExchange
from dlion.resident.lion import ResidentLion
from dlion.roll_call import roll_call_of
from dlion.rules import Lion
from dlion.sharding import check_shards, trained

if TYPE_CHECKING:
    from dlion.optim import Distributed


class Renewal:
    """Finds the exchange that an optimizer's step uses, and how that step is taken.

    Args:
        optimizer: owns this object.
    """

    _steps: Steps

    def __init__(self, optimizer: "Distributed") -> None:
        self._owner = weakref.ref(optimizer)
        apart.votes(optimizer)
        self._exchange: Exchange | None = None
        self._key: tuple[Any, ...] = ()
        self._overlap = Overlap(self._begin_in_backward, optimizer.phases) if optimizer.options.overlap else None

    @property
    def begun(self) -> Exchange | None:
        """The exchange of a step that has begun: ballots may have left during backward."""
        return self._exchange if self._exchange is not None and self._exchange.begun else None

    def ready(self) -> tuple[Exchange, Steps] | None:
        """The exchange of this step, begun and agreed with the other workers; None where the step is over.

        That is one in which this worker has announced another layout and the others have not, where nobody waits: all
        hear of it one step later.

        Raises:
            GroupNotReadyError, AgreementError, ExchangeError, OverlapError.
        """
        begun = self.begun
        if self._overlap is not None:
            if begun is not None:
                self._overlap.check(begun)
            self._overlap.reset()
        self._hear()
        exchange = begun or self._current() or self._renewed()
        if exchange is None:
            return None
        self._exchange = exchange
        exchange.begin()
        exchange.settle()
        return exchange, self._steps

    def begin_anew(self) -> None:
        """All workers have received the same hyper-parameters."""
        if self._exchange is not None:
            self._exchange.begin_anew()

    def between_steps(self) -> Exchange:
        """The exchange agreed with the other workers, while no step has begun.

        Raises:
            GroupNotReadyError, AgreementError, ExchangeError.
            OverlapError: ballots of a step have left.
        """
        self.look()
        exchange = self._current() or self._renewed()
        assert exchange is not None  # all workers are here, and none in a step
        self._exchange = exchange
        return exchange

    def look(self) -> None:
        """Hear what became of the steps so far, and raise what was wrong with one.

        Raises:
            OverlapError: ballots of a step have left, and the workers would not all call each other in one order.
        """
        if self.begun is not None:
            raise OverlapError(
                "replicas cannot be compared after ballots have left, nor steps heard of, with overlap=True: do it "
                "before backward or after step()"
            )
        self._hear(now=True)

    def count(self) -> None:
        """Bring what was counted in the steps so far into the statistics."""
        if self._exchange is not None:
            self._exchange.count()

    def refuse_trouble(self) -> None:
        """Raise an error where a step was refused that nobody has heard of."""
        if self._exchange is not None:
            self._exchange.refuse_trouble()

    def accumulate(self) -> AbstractContextManager[None]:
        """Inside, no ballot leaves during backward."""
        return self._overlap.accumulate() if self._overlap is not None else nullcontext()

    def _hear(self, now: bool = False) -> None:
        """What became of steps that were started and not waited for; with other workers it cannot be talked over."""
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.serves(self._group()):
            exchange.look(now)
        else:
            exchange.count()
            self._exchange = None
            exchange.refuse_trouble()

    @property
    def _optimizer(self) -> "Distributed":
        optimizer = self._owner()
        assert optimizer is not None
        return optimizer

    def _begin_in_backward(self) -> tuple[Exchange, Steps] | None:
        """For `Overlap`: nothing here may wait for other workers."""
        if (exchange := self._current()) is None:
            return None
        exchange.begin()
        return exchange, self._steps

    def _current(self) -> Exchange | None:
        """The exchange at hand, if it serves the group and the layout of now."""
        exchange, optimizer = self._exchange, self._optimizer
        serves = exchange is not None and exchange.serves(self._group())
        return exchange if serves and layout_key(optimizer.param_groups, optimizer.state) == self._key else None

    def _renewed(self) -> Exchange | None:
        """An exchange for the group and the layout of now, agreed with the other workers; None as `ready` says."""
        group, exchange, optimizer = self._group(), self._exchange, self._optimizer
        refuse_new_in_graph(optimizer.param_groups[0]["params"][0].device)
        if exchange is not None and exchange.serves(group):
            if exchange.fits(optimizer.param_groups):
                exchange.bind(optimizer.param_groups, optimizer.state)
            elif not exchange.announce_layout_change():
                return None
            else:
                exchange = None
        else:
            exchange = None
        for each in optimizer.param_groups:  # dtypes and what is frozen may have changed since construction
            check_parameters(each)
        check_shards(trained(optimizer.param_groups), group)
        if group is not None:
            apart.check_voters((param for _, param in trained(optimizer.param_groups)), roll_call_of(group).ranks)
        exchange = exchange or self._agreed(group)
        optimizer.rule.allocate(exchange.replica)
        self._key = layout_key(optimizer.param_groups, optimizer.state)
        if self._overlap is not None:
            self._overlap.watch(exchange)
        return exchange

    def _agreed(self, group: dist.ProcessGroup | None) -> Exchange:
        optimizer, workers = self._optimizer, group.size() if group is not None else 1
        o, rule = optimizer.options, optimizer.rule
        name, kernels = optimizer.chosen_kernels()
        choices = Choices(kernels, workers, o.ties, o.zeros, o.rounding)
        method = METHODS[optimizer.method]
        kind: Callable[..., Exchange] = Exchange
        wire = wire_device(group) if group is not None and workers > 1 else None
        params = [param for _, param in trained(optimizer.param_groups)]
        self._steps = method.steps(rule, choices)
        if resides(method.fused, params, wire):
            assert isinstance(rule, Lion)
            there = kernels_for(name)
            kind, o = partial(ResidentExchange, there), replace(o, bucket_bytes=o.device_bucket_bytes)
            how = (choices.said_zeros, choices.rounding, rule.betas)
            self._steps = ResidentLion(there, self._steps.wire, *how)
        # not optimizer.defaults: torch adds a key to it when a state dict is loaded, which may happen on some workers
        keys = (*rule.defaults(), "weight_decay", "maximize")
        told = (optimizer.param_groups, keys, optimizer.state, optimizer.stats, optimizer.phases, rule.shared_state)
        # with an owner: buckets of several optimizers would mix
        return kind(group, self._overlap, o, self._steps.wire, *told)

    def _group(self) -> dist.ProcessGroup | None:
        optimizer, exchange = self._optimizer, self._exchange
        return optimizer.membership.group(type(optimizer).__name__, exchange.workers if exchange is not None else 1)
