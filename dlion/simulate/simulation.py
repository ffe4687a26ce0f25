"""Simulation: the optimizer of N workers who live in one process, around one model."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from dlion import agreement
from dlion.layout import NO_STATE, check_dense, layout_key
from dlion.methods import METHODS
from dlion.optim import Distributed
from dlion.options import check_parameters
from dlion.scaling import is_scaled
from dlion.simulate.faults import Fault, Schedule
from dlion.simulate.fixed import FIXED
from dlion.simulate.team import Team, check_arguments
from dlion.simulate.worker import Worker
from dlion.stats import Stats


class Simulation(Distributed):
    """N workers of any method in one process, on one device: bitwise what N processes with `Distributed` do.

    The parameters exist once, since all workers' are bitwise equal; momenta (and whatever else a method keeps for each
    worker) and the model's buffers exist N times, ballots of one step too. A step is:

        for rank in range(simulation.workers):
            with simulation.worker(rank):
                loss_of(model, batch_of(rank)).backward()
        simulation.step()

    Between steps the model holds worker 0's buffers. A random number generator is not a worker's own: seed it inside
    the `with`.

    Args:
        model: holds the parameters and buffers. Its device is the workers'.
        method, lr, betas, weight_decay, zeros, nonfinite, rounding, momentum_dtype: as in `dlion.Distributed`.
        topology, maximize, kernels, bucket_bytes: the same; the topology changes what is counted and no bit.
        workers: how many.
        params: parameters, named parameters or groups; None takes `model.named_parameters()`.
        ties: also "fixed", for ablations: every tie is +1.
        settings: hyper-parameters that only this method has, as in `dlion.Distributed`.
        faults: what goes wrong: `Fault`s, of which the first that fits counts; or a function (rank, step) -> act.

    Attributes:
        stats: of worker 0, as if it were real; start-up checks are not simulated and count nothing.

    Raises:
        ValueError: at construction, as `dlion.Distributed`; and for faults that cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        method: str = "dlion-mavo",
        lr: float | Tensor | None = None,
        betas: tuple[float, float] | None = None,
        weight_decay: float = 0.0,
        *,
        workers: int,
        params: ParamsT | None = None,
        topology: str = "auto",
        ties: str | None = None,
        zeros: str = "balanced",
        nonfinite: str = "abstain",
        rounding: str | None = None,
        momentum_dtype: torch.dtype | None = None,
        maximize: bool = False,
        kernels: str = "auto",
        bucket_bytes: int | None = None,
        faults: Iterable[Fault] | Schedule = (),
        **settings: Any,
    ) -> None:
        check_arguments(model, workers, settings)
        self.model = model
        fixes = ties == FIXED and method in METHODS and "ties" in METHODS[method].options
        super().__init__(
            model.named_parameters() if params is None else params,
            method,
            lr,
            betas,
            weight_decay,
            topology=topology,
            ties="rotate" if fixes else ties,
            zeros=zeros,
            nonfinite=nonfinite,
            rounding=rounding,
            momentum_dtype=momentum_dtype,
            maximize=maximize,
            kernels=kernels,
            bucket_bytes=bucket_bytes,
            **settings,
        )
        self.options = replace(self.options, ties=ties or self.options.ties)
        self._team = Team(workers, model, self.options, self.chosen_kernels()[1], self.phases)
        self._team.workers[0].stats = self.stats
        self._key: tuple[Any, ...] = ()
        self._schedule = self._team.schedule(faults)
        self._in: int | None = None
        self._begun = False

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self._team.workers)

    def stats_of(self, rank: int) -> Stats:
        """What a worker would have sent and received."""
        return self._team.worker(rank).stats

    def state_dict(self, rank: int = 0) -> dict[str, Any]:
        """The state of one worker's optimizer, as its own `state_dict()` would give it."""
        with self.seen_by(rank):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], rank: int = 0) -> None:
        """Load the state of one worker's optimizer; hyper-parameters and t are common, so the last load's count.

        Raises:
            ValueError: as `dlion.Distributed`; or within a step.
        """
        if self._begun:
            raise ValueError("a state was loaded within a step: load it before the first worker computes")
        with self.seen_by(rank):
            super().load_state_dict(state_dict)
        self._key = ()

    def verify_replicas(self) -> list[int]:
        """All workers have one copy of the parameters: nobody is ever mended."""
        return []

    @contextmanager
    def seen_by(self, rank: int) -> Iterator[None]:
        """Inside, `state` is that of a worker."""
        worker = self._team.worker(rank)
        self.state = worker.state
        try:
            yield
            worker.state = self.state
        finally:
            self.state = self._team.workers[0].state

    def buffers(self, rank: int) -> dict[str, Tensor]:
        """A worker's own values of the model's buffers, by name; copies."""
        return self._team.worker(rank).buffers.state_dict()

    def load_buffers(self, values: dict[str, Tensor], rank: int) -> None:
        """Give a worker these values of its buffers.

        Raises:
            ValueError: they are not those of this model; or a worker is computing.
        """
        self._refuse_within("load_buffers")
        self._team.worker(rank).buffers.load(values)
        self._team.workers[0].buffers.put()

    def synchronize_buffers(self) -> None:
        """What `dlion.synchronize_buffers(model)` does between processes: everybody has the mean, or worker 0's.

        Raises:
            ValueError: a worker is computing.
        """
        self._refuse_within("synchronize_buffers")
        self._team.synchronize_buffers()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a Simulation can be neither copied nor pickled: keep state_dict(rank) and buffers(rank)")

    @contextmanager
    def worker(self, rank: int) -> Iterator[None]:
        """Inside, the model is this worker's: it has its buffers, and gradients that start at None become its ballots.

        An exception inside leaves the worker as it was. What an absent worker computes here counts for nothing, and may
        be left out.

        Raises:
            ValueError: there is no such worker, or it has computed in this step already, or another one is computing.
        """
        worker = self._team.worker(rank)
        if self._in is not None:
            raise ValueError(f"worker {self._in} is computing: let its `with` end before that of worker {rank}")
        self._begin()
        if worker.spoke:
            raise ValueError(f"worker {rank} has computed in this step already: call step() first")
        worker.buffers.put()
        self._clear_gradients()
        self._in = rank
        try:
            yield
            with torch.no_grad():
                self._hear(worker)
        finally:
            self._in = None
            self._clear_gradients()

    def act(self, rank: int) -> str | None:
        """The fault of a worker in the step that comes, None for an honest one."""
        worker = self._team.worker(rank)
        self._begin()
        return worker.act

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count everybody's ballots and apply the verdicts to the one copy of the parameters.

        Called by a worker's gradient scaler, inside its `with`, it takes the scale out of that worker's gradients.

        Raises:
            ValueError: a worker has not computed in this step, or (hyper-)parameters changed since the first one did;
                or a closure was given, which would have one gradient for all.
            NonFiniteGradientError: with `nonfinite="raise"`; nothing was written.
        """
        if closure is not None:
            raise ValueError(
                "a closure has one gradient for all workers: compute inside `with simulation.worker(rank)`"
            )
        if is_scaled(self):
            return self._team.unscale(self, self._in)
        self._refuse_within("step")
        self._begin()
        if self._idle:
            self._renew()
            self._end()
            return None
        if self._hypers() != self._begun_with:
            raise ValueError("learning rates or other hyper-parameters changed after the first worker: set them before")
        if layout_key(self.param_groups, NO_STATE) != self._begun_on:
            raise ValueError("parameters came, were frozen or unfrozen after the first worker: do it between steps")
        self._team.check_all_spoke()
        try:
            actor, moved = self._team.actor, False
            with self.phases("ballot"):
                self._team.survey(self.stats.steps)
            for bucket, verdict, header in self._team.decided():
                if header.voters:
                    with self.phases("apply"):
                        actor.steps.apply(actor.replica, bucket, verdict, header.voters, actor.moment)
                    moved = True
            actor.steps.finish(actor.replica)
        finally:
            self._end()
        self._team.advance(self.param_groups, moved)
        return None

    def _refuse_within(self, name: str) -> None:
        if self._in is not None:
            raise ValueError(f"{name}() came while worker {self._in} is computing: let its `with` end first")

    def _begin(self) -> None:
        """Begin a step, unless it has begun."""
        if self._begun:
            return
        self._idle = not self.state and all(float(group["lr"]) == 0 for group in self.param_groups)
        if not self._idle and layout_key(self.param_groups, self.state) != self._key:
            self._renew()
        self._begun_with, self._begun_on = self._hypers(), layout_key(self.param_groups, NO_STATE)
        for worker in self._team.workers:
            act = self._schedule(worker.rank, self.stats.steps)
            if act is not None:
                Fault(act, ())  # an unknown one is a ValueError
            worker.act, worker.spoke = act, False
            if not self._idle:
                worker.begin(self.param_groups[0]["t"], act, self._begun_with)
        self._begun = True

    def _end(self) -> None:
        """The step is over, well or not."""
        self._begun = False
        self._team.end()
        self._team.workers[0].buffers.put()

    def _renew(self) -> None:
        """Take up the parameters of now."""
        for group in self.param_groups:
            check_parameters(group)
        self._team.bind(self.param_groups, self.state)
        self._key = layout_key(self.param_groups, self.state)

    def _hypers(self) -> list[dict[str, Any]]:
        return agreement.hyper_parameters(self.param_groups, {*self.rule.defaults(), "weight_decay", "maximize"})

    def _hear(self, worker: Worker) -> None:
        """What was computed inside `with`: its buffers, and its ballots."""
        if not worker.absent:
            worker.buffers.keep()
            if not self._idle:
                for param in worker.replica.params:
                    check_dense(param)
                with self.phases("ballot"):
                    self._team.hear(worker, self.stats.steps)
        worker.spoke = True

    def _clear_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.zero_grad(set_to_none=True)
