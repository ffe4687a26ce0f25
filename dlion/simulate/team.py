"""The workers of a simulation: hired once, bound to the parameters of now, consulted bucket by bucket."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dlion import agreement
from dlion.agreement_rates import AgreementRates
from dlion.errors import NonFiniteGradientError
from dlion.header import Status, VerdictHeader
from dlion.layout import Bucket, Layout
from dlion.methods import METHODS, Choices
from dlion.options import Options
from dlion.phases import Phases
from dlion.quoting import shown
from dlion.replica import Replica
from dlion.scaling import unscaled
from dlion.settings import LARGEST, whole
from dlion.simulate.attacks import Attack, attack_on
from dlion.simulate.buffers import Buffers, synchronize
from dlion.simulate.consult import consult
from dlion.simulate.faults import ATTACKS, Fault, Schedule, schedule_of
from dlion.simulate.fixed import FIXED, fixed
from dlion.simulate.survey import conduct
from dlion.simulate.table import Lines, Seat, Table
from dlion.simulate.worker import Worker
from dlion.stats import Stats
from dlion.survey import Question
from dlion.topology import choose_topology

Reading = tuple[Bucket, Tensor, VerdictHeader]


class Team:
    """N workers of one method around one model.

    Args:
        size: N.
        model: whose buffers each worker has for itself.
        options: as given to the optimizer; `ties` may be "fixed" too.
        kernels: of `dlion.ops.choose`.
        phases: times the tally.

    Attributes:
        workers: in rank order.
        layout: of the parameters that were bound.
    """

    layout: Layout

    def __init__(self, size: int, model: nn.Module, options: Options, kernels: ModuleType, phases: Phases) -> None:
        self._options, self._kernels, self._phases = options, kernels, phases
        self._table = Table(size)
        self.workers = [self._hire(Seat(self._table, rank), model) for rank in range(size)]
        self.wire = self.workers[0].steps.wire
        self._rates = AgreementRates(self.wire, size)
        self._asked: dict[int, Question] = {}
        self._answers: list[Tensor] = []

    def _hire(self, seat: Seat, model: nn.Module) -> Worker:
        """A new worker, with the method's rule and pipeline for a group of this size."""
        o, method = self._options, METHODS[self._options.method]
        rule = method.rule(self._kernels, o.rounding, o.momentum_dtype)
        ties = "rotate" if o.ties == FIXED else o.ties
        steps: Any = method.steps(rule, Choices(self._kernels, seat.size, ties, o.zeros, o.rounding))
        if o.ties == FIXED:
            steps = replace(steps, wire=replace(steps.wire, count=fixed(steps.wire.count)))
        return Worker(seat.rank, rule, steps, Stats(), seat, defaultdict(dict), Buffers(model))

    def bind(self, param_groups: list[dict[str, Any]], state: Any) -> None:
        """Take up these parameters; `state` is worker 0's."""
        self.layout = Layout.of(param_groups, self.wire.bucket_elements(self._options.bucket_bytes), self.wire.up.align)
        words = sum(bucket.words for bucket in self.layout.buckets)
        first, name = self.workers[0], self._options.topology
        first.state = state
        for worker in self.workers:
            worker.replica = Replica(param_groups, worker.state)
            if worker is not first:
                share(first, worker)
            worker.rule.allocate(worker.replica)
            lines = Lines(worker.seat, worker.seat) if len(self.workers) > 1 else None
            worker.topology = choose_topology(name, lines, worker.stats, words, self.wire.replicate)

    @property
    def actor(self) -> Worker:
        """Who does for all what all do with the verdicts: the first who knows what was asked and answered before."""
        return next((worker for worker in self.workers if not worker.absent), self.workers[0])

    @cached_property
    def attack(self) -> Attack:
        """How this method's ballots are attacked; a ValueError where that is not defined."""
        return attack_on(self.wire.up, self._options.method)

    def worker(self, rank: int) -> Worker:
        """One of them.

        Raises:
            ValueError: there is no such worker.
        """
        if type(rank) is not int or not 0 <= rank < len(self.workers):
            raise ValueError(f"worker {rank!r} does not exist: there are workers 0 to {len(self.workers) - 1}")
        return self.workers[rank]

    def schedule(self, faults: Iterable[Fault] | Schedule) -> Schedule:
        """(rank, step) -> what is wrong with a worker.

        Raises:
            ValueError: a fault names a worker that does not exist, or an attack that is not defined for this method.
        """
        if callable(faults):
            return faults
        listed = tuple(faults) if isinstance(faults, Iterable) else ()
        if not isinstance(faults, Iterable) or not all(isinstance(one, Fault) for one in listed):
            raise ValueError(
                f"faults={faults!r} is no list of faults: give one such as [Fault('absent', [1])], or a function "
                "(rank, step) -> act"
            )
        if any(fault.act in ATTACKS for fault in listed):
            _ = self.attack
        return schedule_of(listed, len(self.workers))

    def hear(self, worker: Worker, step: int) -> None:
        """Let a worker write its ballots from the gradients that are in the parameters, or first ask what it must know.

        Args:
            step: of the simulation, skipped ones included.
        """
        question = worker.ask()
        if question is None:
            self._let_speak(worker, step)
        else:
            self._asked[worker.rank] = question

    def survey(self, step: int) -> None:
        """Answer what was asked; who did then writes its ballots."""
        self._answers = conduct(self._asked, self.workers, self._table)
        for rank in self._asked:
            self._let_speak(self.workers[rank], step)
        self._asked = {}

    def unscale(self, optimizer: torch.optim.Optimizer, rank: int | None) -> None:
        """A gradient scaler called `step()`: take its scale out of the gradients of the worker who is computing.

        Raises:
            ValueError: nobody is.
        """
        if rank is None:
            raise ValueError(
                "a gradient scaler called step() while no worker was computing, and every worker has gradients and a "
                "scaler of its own: call `scalers[rank].step(simulation)` inside `with simulation.worker(rank)`, and "
                "`simulation.step()` when all have computed"
            )
        self.workers[rank].resting = not unscaled(optimizer)

    def check_all_spoke(self) -> None:
        """Raise a ValueError if somebody who is not absent has not computed in this step."""
        for worker in self.workers:
            if not (worker.spoke or worker.absent):
                raise ValueError(
                    f"worker {worker.rank} has not computed in this step: run its backward pass inside `with "
                    f"simulation.worker({worker.rank})`, or give it the fault 'absent'"
                )

    def _let_speak(self, worker: Worker, step: int) -> None:
        worker.speak(self.layout.buckets, Status[self._options.nonfinite.upper()], lambda: self.attack, step)

    def end(self) -> None:
        """The step is over, well or not; who was absent takes up what all share."""
        self._asked, self._answers = {}, []
        for worker in self.workers:
            worker.forget()
            if worker.absent:
                share(self.actor, worker)

    def decided(self) -> Iterable[Reading]:
        """The verdicts to apply: those of all buckets first, where one of them can forbid the others.

        Raises:
            NonFiniteGradientError: some worker's gradients are not finite, and the policy is "raise".
        """
        readings = (self._consult(bucket) for bucket in self.layout.buckets)
        if self._options.nonfinite == "abstain":
            return readings
        held = list(readings)
        statuses = {header.status for _, _, header in held}
        if Status.RAISE in statuses:
            found = [worker.not_finite for worker in self.workers]
            t = self.workers[0].moment.t
            raise NonFiniteGradientError(agreement.explain_not_finite(found, range(len(found)), t))
        return [] if Status.SKIP in statuses else held

    def _consult(self, bucket: Bucket) -> Reading:
        with self._phases("tally"):
            observer = self._rates.sample(bucket, self.workers[0].moment.t, len(self.layout.buckets))
            return bucket, *consult(bucket, self.workers, self._answers, self._table, lambda: self.attack, observer)

    def advance(self, param_groups: list[dict[str, Any]], moved: bool) -> None:
        """Count a step that is over."""
        for worker in self.workers:
            worker.stats.stepped(self.layout.numel, len(self.workers))
            worker.stats.skipped += not moved
        self._rates.close(self.actor.moment.t, None, [worker.stats for worker in self.workers])
        for group in param_groups:
            group["t"] = self.actor.moment.t + moved

    def synchronize_buffers(self) -> None:
        """Give all workers the same buffers, and put them into the model."""
        synchronize([worker.buffers for worker in self.workers])
        self.workers[0].buffers.put()


def share(giver: Worker, taker: Worker) -> None:
    """Let two workers have the same tensors where the method's state is common to all: so it is kept once."""
    common = {id(tensor) for tensor in giver.rule.shared_state(giver.replica)}
    for param, kept in giver.state.items():
        taker.state[param] |= {name: value for name, value in kept.items() if id(value) in common}


def check_arguments(model: Any, workers: Any, settings: dict[str, Any]) -> None:
    """Raise a ValueError for what a simulation cannot be made of, among it arguments that only real workers have."""
    if type(workers) is not int or not whole(workers, 1):
        raise ValueError(f"workers={shown(workers)} must be a number of workers, at least 1 and at most {LARGEST:,}")
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is a {type(model).__name__} and must be the module, whose buffers each worker has for itself: "
            "parameters are chosen by params="
        )
    for name in ("process_group", "overlap", "timeout", "verify_every", "on_mismatch"):
        if name in settings:
            raise ValueError(f"{name} has no meaning where all workers compute in one process: leave it out")
