"""One simulated worker: what is its own (state, buffers, counters), and what it says in a step."""

from collections.abc import Callable
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
from dlion.topology import Topology


@dataclass(eq=False)
class Worker:
    """What one of N workers keeps between steps, and its ballots in the step at hand.

    Attributes:
        state: of its optimizer, as `torch.optim.Optimizer.state`.
        buffers: its own values of the model's buffers.
        act: its fault in this step, None for an honest worker.
        spoke: whether it has computed in this step.
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
    not_finite: str | None = None
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
        self.moment, self.act = Moment(t, self.rank), act
        self.spoke, self.not_finite = False, None
        self.replica.hypers = hypers
        self._said.clear()

    def speak(self, buckets: tuple[Bucket, ...], nonfinite: Status, attack: Callable[[], Attack], step: int) -> None:
        """Write this step's ballots from the gradients that are in the parameters; its state moves."""
        if self.act == NAN:
            for param in self.replica.params:
                param.grad = torch.full_like(param, torch.nan)
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

    def ballot(self, bucket: Bucket) -> tuple[Tensor, Status]:
        """What it said of a bucket; who has said nothing sends an empty ballot that does not count."""
        if bucket.number in self._said:
            return self._said[bucket.number]
        blank = torch.zeros(bucket.size, dtype=bucket.dtype, device="cpu")
        return self.steps.wire.up.encode(blank, bucket, self.moment), Status.ABSTAIN

    def forget(self, bucket: Bucket) -> None:
        """The bucket has been counted: its ballot is not needed any more."""
        self._said.pop(bucket.number, None)
