"""The torch.optim.Optimizer contract, for any method."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlion.exchange import Exchange, Reading
from dlion.header import Status
from dlion.joining import Follower, Onlooker, announce
from dlion.membership import Membership
from dlion.ops import choose
from dlion.options import Options, check_group
from dlion.own_state import OwnState
from dlion.phases import Phases
from dlion.pipeline import Steps
from dlion.renewal import Renewal
from dlion.replica import Replica
from dlion.scaling import refuse_overlap, scale_of_a_step, unscale
from dlion.settings import check_settings
from dlion.stats import Stats
from dlion.untraced import tell_dynamo, untraced


class Distributed(OwnState, Follower):
    """Data-parallel training by any method of `dlion.methods.METHODS`; gradients must be local, not averaged.

    Every worker builds it over the same parameters (wrap the model with `dlion.local_gradients` first) and calls
    `step()` as often as the others. All workers end each step with bitwise equal parameters.

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer.
        method: a name of `dlion.methods.METHODS`.
        lr: learning rate, float or tensor; None takes the method's own default (Lion 1e-4, AdamW 1e-3).
        betas: of Lion and AdamW; None takes the method's own default (Lion (0.9, 0.99), AdamW (0.9, 0.999)).
        weight_decay: decoupled: `p *= 1 - lr*weight_decay`.
        process_group: the workers that vote; None is the default group, looked up at the first step.
        topology: "sharded" sends less than 2 bits per parameter for any number of workers N; "replicated" takes one
            call instead of two but sends N-1; "server" is the paper's drawing; "auto" takes replicated for two workers
            or small models, else sharded. All give the same bits. Full precision is sharded among more than two
            workers, whatever the size of the model; ballots that cannot be counted in parts are always replicated.
        ties: what an even vote does: "rotate" (default of majority) lets one voter after another decide; "alternate"
            goes up and down in turn; "zero" does not move, and needs `zeros="exact"`.
        zeros: what a worker says where its message is exactly zero. "balanced": a bit that the next step complements;
            "exact": two bits on the wire, a zero abstains at its element.
        nonfinite: what an infinite or NaN gradient does: "abstain": this worker's votes in the bucket do not count;
            "skip": nobody moves in this step; "raise": an error on every worker, and nothing was written.
        rounding: of bfloat16 and float16 parameters. "stochastic" (the default of Lion): up or down with the odds of
            the distance, equal on all workers, so that steps below the dtype's resolution are not lost; "nearest".
        momentum_dtype: torch.bfloat16 halves the memory of float32 momenta, computed in float32 and rounded up or down
            with the odds of the distance; for all parameters. None: float32, and float64 for float64 parameters.
        maximize: step up the gradient.
        kernels: "auto" takes "native" (C++) for CPU tensors where it was compiled, "triton" for tensors on a GPU where
            torch brought it, else "reference" (pure torch). All give the same bits.
        bucket_bytes: of one-bit ballots that travel together, a multiple of 8; 1 MiB, and 128 KiB with `overlap=True`;
            for Lion's votes on an accelerator, where a bucket costs the host more than the device, 32 and 2 MiB.
        overlap: send ballots while backward still runs, as soon as the gradients of a bucket are there; the same bits.
            Gradients must not change between backward and `step()` (no clipping, no gradient scaler), and all backward
            passes but the last of a step belong into `with optimizer.accumulate():`.
        timeout: seconds to wait for other workers; None takes the process group's.
        verify_every: applied steps between two comparisons of all workers' parameters (and of state that a method keeps
            equal) by checksums; 0 or None: never.
        on_mismatch: "raise" an error that names ranks and parameters; or "repair": where a strict majority is equal,
            the others take its values and keep their own momentum, with a warning.
        settings: hyper-parameters that only this method has (`keep=0.04` of "dgc"), its own defaults where left out.
            They live in `param_groups`, as lr does.

    Lion's votes on an accelerator are steps that `step()` starts and does not wait for: what was wrong with one is
    raised by the next `step()`, on all workers, and nothing was applied since. `param_groups` then hold t as a tensor,
    and lr and weight decay may be tensors there. A graph that a step was captured in reads the optimizer's memory.

    Attributes:
        stats: `dlion.Stats`, what the exchange cost; to ask for it waits for steps under way.
        phases: seconds by phase, once `phases.start()` was called.

    Raises:
        ValueError: at construction, for options out of range and parameters that cannot be trained so.
        GroupNotReadyError, AgreementError, ExchangeError, NonFiniteGradientError: from `step()`.
        OverlapError: from `step()`, backward and `load_state_dict()`, with `overlap=True`.
    """

    def __init__(
        self,
        params: ParamsT,
        method: str = "dlion-mavo",
        lr: float | Tensor | None = None,
        betas: tuple[float, float] | None = None,
        weight_decay: float = 0.0,
        *,
        process_group: dist.ProcessGroup | None = None,
        topology: str = "auto",
        ties: str | None = None,
        zeros: str = "balanced",
        nonfinite: str = "abstain",
        rounding: str | None = None,
        momentum_dtype: torch.dtype | None = None,
        maximize: bool = False,
        kernels: str = "auto",
        bucket_bytes: int | None = None,
        overlap: bool = False,
        timeout: float | timedelta | None = None,
        verify_every: int | None = 100,
        on_mismatch: str = "raise",
        **settings: Any,
    ) -> None:
        self.method = method
        votes = (method, topology, ties, zeros, nonfinite, rounding, momentum_dtype, bucket_bytes, overlap)
        self.options = Options.checked(*votes, timeout, verify_every, on_mismatch)
        self.asked_kernels = kernels
        self._stats = Stats()
        self.phases = Phases()
        self.process_group = process_group
        self._attach()
        defaults = self.rule.defaults()
        if betas is not None and "betas" not in defaults:
            raise ValueError(f"betas={betas!r} has no meaning with method={method!r}, which has none: leave it out")
        check_settings(method, defaults, settings)
        given = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, **settings}
        defaults |= {name: value for name, value in given.items() if value is not None}
        super().__init__(params, defaults)

    _step_supports_amp_scaling = True  # what a gradient scaler asks

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "step" in vars(cls):
            cls.step = untraced(cls.step)  # type: ignore[method-assign]

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send this worker's votes, apply what all decided: gradient -> ballot -> send, receive -> apply -> parameter.

        A fresh optimizer whose learning rates are all 0 only allocates its state, and asks nobody: that is how torch
        initialises the state of an optimizer. In later steps 0 is a learning rate like any other.

        `scaler.step(optimizer)` of a gradient scaler calls it in any case: gradients are unscaled with this worker's
        own scale, and a worker whose gradients overflowed does not vote, nor does its momentum move. It needs
        `overlap=False`.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            What the closure returned, else None.
        """
        announce(self)
        with scale_of_a_step(self):
            if self.options.overlap:
                refuse_overlap(self)
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            if self._begins_with_state_alone() or (ready := self._renewal.ready()) is None:
                return loss
            exchange, steps = ready
            if (overflowed := unscale(self)) is not None:
                exchange.rest_where(overflowed)
            self._take(exchange, steps)
        return loss

    def _take(self, exchange: Exchange, steps: Steps, applied: bool = True) -> None:
        """The step that has begun; `applied`: whether `steps` do with parameters what all others do."""
        try:
            exchange.survey.conduct(steps.survey(exchange.replica, exchange.moment))
            for bucket, verdict, voters in exchange.decide(self._verdicts(exchange, steps)):
                with self.phases("apply"):
                    steps.apply(exchange.replica, bucket, verdict, voters, exchange.moment)
                del verdict  # or the next bucket's buffers come on top of it
            steps.finish(exchange.replica)
        finally:
            exchange.end()
        exchange.close(applied)

    def _verdicts(self, exchange: Exchange, steps: Steps) -> Iterator[Reading]:
        for bucket in exchange.unsent():  # with overlap, what backward did not bring
            with self.phases("ballot"):
                if exchange.replica.resting:
                    exchange.abstain(bucket)
                else:
                    exchange.send(bucket, *steps.ballot(exchange.replica, bucket, exchange.moment))  # moves momentum
            if not self.options.overlap:
                yield exchange.receive()
        while exchange.flight:
            yield exchange.receive()

    def _begins_with_state_alone(self) -> bool:
        """Whether this step allocates state and does nothing else."""
        if self.state or any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        self.rule.allocate(Replica(self.param_groups, self.state))
        return True

    @untraced
    @torch.no_grad()
    def look_on(self) -> None:
        """Take part in a step of the workers that have data still, without a vote, a move or a change but to t.

        `Join` calls it for a worker that has none left; `dlion.joining` says more.
        """
        if not self._begins_with_state_alone() and (ready := self._renewal.ready()) is not None:
            exchange, steps = ready
            exchange.rest(Status.FINISHED)
            self._take(exchange, Onlooker(steps), applied=False)

    @untraced
    @torch.no_grad()
    def verify_replicas(self) -> list[int]:
        """Compare all workers' parameters now, as `verify_every` does; all workers call it, between two steps.

        Returns:
            The ranks, in the default process group, that were mended; none where all are equal.

        Raises:
            AgreementError: they differ. OverlapError: ballots of a step have left.
        """
        exchange = self._renewal.between_steps()
        return exchange.checks.verification.compare(exchange.replica, int(self.param_groups[0]["t"]))

    @torch.no_grad()
    def check(self) -> None:
        """Raise now what the next `step()` would raise of steps so far; all workers call it, between two steps.

        On an accelerator steps are started and not waited for. Call it after the last one, and between replays of a
        graph that `step()` was captured in: no step is applied after one that went wrong, and nothing else says so.

        Raises:
            AgreementError, NonFiniteGradientError. OverlapError: ballots of a step have left.
        """
        self._renewal.look()

    def accumulate(self) -> AbstractContextManager[None]:
        """For every backward pass but the last of a step, with `overlap=True`; without, nothing needs holding back."""
        return self._renewal.accumulate()

    @property
    def kernels(self) -> str:
        """Name of the kernels in use."""
        return self.chosen_kernels()[0]

    def chosen_kernels(self) -> tuple[str, Any]:
        """Name and namespace of the kernels for where the parameters are now; a ValueError where there are none."""
        return choose(self.asked_kernels, self.param_groups[0]["params"][0].device)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The workers that vote; None is the default group."""
        return self.membership.given

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        self.membership = Membership(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every worker; their momentum starts at zero, their t is the others'."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["t"] = self.param_groups[0].get("t", 0)
        try:
            check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise

    def _attach(self) -> None:
        super()._attach()
        self._renewal = Renewal(self)
        Follower.__init__(self)
        tell_dynamo()
