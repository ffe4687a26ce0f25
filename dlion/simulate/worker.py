"""One simulated worker: what is its own (state, buffers, counters), and what it says in a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlion.agreement import first_not_finite
from dlion.codecs import Moment
from dlion.header import Status
from dlion.layout import Bucket
from dlion.pipeline import Steps
from dlion.replica import Replica
from dlion.rules import Rule
from dlion.simulate.attacks import Attack
from dlion.simulate.buffers import Buffers
from dlion.simulate.faults import ABSENT, INVERTED, LATE, NAN, RANDOM
from dlion.simulate.table import Seat
from dlion.stats import Stats
from dlion.survey import Question, Questions
from dlion.topology import Topology


@dataclass(eq=False)
class Worker:
    """What one of N workers keeps between steps, and its ballots in the step at hand.

    Attributes:
        state: of its optimizer, as `torch.optim.Optimizer.state`.
        buffers: its own values of the model's buffers.
        act: its fault in this step, None for an honest worker.
        spoke: whether it has computed in this step.
        resting: whether its gradient scaler found an overflow in it: it does not vote, and its state rests.
    """

    rank: int
    rule: Rule
    steps: Steps
    stats: Stats
    seat: Seat
    state: Any
    buffers: Buffers
    act: str | None = None
    spoke: bool = False
    resting: bool = False
    not_finite: str | None = None
    _gradients: list[Tensor | None] = field(default_factory=list)
    _questions: Questions | None = None
    _said: dict[int, tuple[Tensor, Status]] = field(default_factory=dict)

    replica: Replica = field(init=False)
    topology: Topology = field(init=False)
    moment: Moment = field(init=False)

    @property
    def absent(self) -> bool:
        """Whether it takes no part in this step."""
        return self.act == ABSENT

    def begin(self, t: int, act: str | None, hypers: list[dict[str, Any]]) -> None:
        """A step begins: `t` verdicts were applied before."""
        self.moment, self.act = Moment(t, self.rank, self.seat.size), act
        self.spoke, self.not_finite, self._questions = False, None, None
        self.replica.hypers, self.resting = hypers, False
        self.forget()

    def ask(self) -> Question | None:
        """The first question that must be answered before it can speak, from the gradients that are in the parameters.

        They are kept until it has spoken. None where the method asks nothing.
        """
        if self.act == NAN:
            for param in self.replica.params:
                param.grad = torch.full_like(param, torch.nan)
        self.replica.resting = self.resting
        questions = self.steps.survey(self.replica, self.moment)
        first = next(questions, None)
        if first is not None:
            self._questions, self._gradients = questions, [param.grad for param in self.replica.params]
        return first

    def hear(self, answer: Tensor) -> Question | None:
        """Take the answer to its question; the next one, None after the last."""
        assert self._questions is not None
        with self._own_gradients():
            try:
                return self._questions.send(answer)
            except StopIteration:
                return None

    def speak(self, buckets: tuple[Bucket, ...], nonfinite: Status, attack: Callable[[], Attack], step: int) -> None:
        """Write this step's ballots from its gradients; its state moves. Who rests writes none."""
        if self.resting:
            return
        with self._own_gradients():
            for bucket in buckets:
                planes, finite = self.steps.ballot(self.replica, bucket, self.moment)
                if self.act == INVERTED:
                    planes = attack().inverted(planes, bucket)
                elif self.act == RANDOM:
                    planes = attack().random(planes, bucket, step, self.rank)
                status = Status.ABSTAIN if self.act == LATE else Status.OK if finite else nonfinite
                if status == Status.RAISE:
                    self.not_finite = self.not_finite or first_not_finite(self.replica.param_groups)
                self._said[bucket.number] = (planes, status)
        self._gradients = []

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Inside, the gradients that were kept are in the parameters; those that are there, where none were."""
        for param, grad in zip(self.replica.params, self._gradients, strict=False):
            param.grad = grad
        try:
            yield
        finally:
            if self._gradients:
                for param in self.replica.params:
                    param.grad = None

    def ballot(self, bucket: Bucket, answers: list[Tensor]) -> tuple[Tensor, Status]:
        """What it said of a bucket; who has said nothing sends a ballot that is blank and does not count."""
        if bucket.number in self._said:
            return self._said[bucket.number]
        device = self.replica.params[0].device if self.replica.params else None
        return self.steps.wire.up.blank(bucket, answers).to(device), Status.ABSTAIN

    def forget(self, bucket: Bucket | None = None) -> None:
        """Ballots that were counted are not needed any more; None: none is."""
        if bucket is not None:
            self._said.pop(bucket.number, None)
        else:
            self._said.clear()
            self._gradients = []
