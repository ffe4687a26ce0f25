"""Workers that lie, among real ones: what a worker says is changed between its pipeline and the network."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from dlion.codecs import Moment
from dlion.layout import Bucket
from dlion.methods import Choices, Method
from dlion.pipeline import Steps, Wire
from dlion.replica import Replica
from dlion.rules import Rule
from dlion.simulate.attacks import Attack, attack_on
from dlion.simulate.faults import COLLUDING, INVERTED, RANDOM
from dlion.survey import Questions
from dlion.tallies import Count


@dataclass
class Board:
    """What honest workers said, for colluders to read: ballots travel in the clear."""

    said: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def post(self, t: int, bucket: int, rank: int, planes: Tensor) -> None:
        """Let everybody know a ballot."""
        with self._news:
            self.said[t, bucket, rank] = planes.clone()
            self._news.notify_all()

    def of(self, t: int, bucket: int, ranks: Sequence[int]) -> list[Tensor]:
        """The ballots of these workers, once they are there."""
        keys = [(t, bucket, rank) for rank in ranks]
        with self._news:
            assert self._news.wait_for(lambda: all(key in self.said for key in keys), timeout=30)
            return [self.said[key] for key in keys]


@dataclass(frozen=True)
class Plot:
    """Who lies, and how: the ranks `liars` have the fault `act`, one of the simulator's attacks; None: nobody lies."""

    act: str | None
    liars: Sequence[int]
    honest: Sequence[int]
    board: Board = field(default_factory=Board)
    me: threading.local = field(default_factory=threading.local)  # me.rank: of the worker that this thread is


MISCOUNTING = "miscounting"  # votes honestly, and announces the opposite of what its shard decided


@dataclass(frozen=True)
class Opposite:
    """Counts, and says the opposite."""

    count: Count

    @property
    def ballot_planes(self) -> int:
        return self.count.ballot_planes

    @property
    def verdict_planes(self) -> int:
        return self.count.verdict_planes

    def __call__(self, ballots: Tensor, first_word: int, t: int) -> Tensor:
        return ~self.count(ballots, first_word, t)


@dataclass(frozen=True)
class Lying:
    """The steps of a worker, whose ballots say something else where it is a liar."""

    steps: Steps
    plot: Plot
    attack: Attack

    @property
    def wire(self) -> Wire:
        return self.steps.wire

    def survey(self, replica: Replica, moment: Moment) -> Questions:
        return self.steps.survey(replica, moment)

    def ballot(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, bool]:
        planes, finite = self.steps.ballot(replica, bucket, moment)
        plot, attack = self.plot, self.attack
        if moment.rank not in plot.liars:
            plot.board.post(moment.t, bucket.number, moment.rank, planes)
        elif plot.act == INVERTED:
            planes = attack.inverted(planes, bucket)
        elif plot.act == RANDOM:
            planes = attack.random(planes, bucket, moment.t, moment.rank)
        elif plot.act == COLLUDING:
            seen = plot.board.of(moment.t, bucket.number, plot.honest)
            planes = attack.inverted(attack.agreed(seen, bucket, moment.t), bucket)
        return planes, finite

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, voters: int, moment: Moment) -> None:
        self.steps.apply(replica, bucket, verdict, voters, moment)

    def finish(self, replica: Replica) -> None:
        self.steps.finish(replica)


@dataclass(frozen=True)
class Corrupted(Method):
    """A method some of whose workers lie."""

    plot: Plot = field(default_factory=lambda: Plot(None, (), ()))

    def steps(self, rule: Rule, choices: Choices) -> Steps:
        steps: Any = super().steps(rule, choices)
        if self.plot.act == MISCOUNTING and self.plot.me.rank in self.plot.liars:
            steps = replace(steps, wire=replace(steps.wire, count=Opposite(steps.wire.count)))
        return Lying(steps, self.plot, attack_on(steps.wire.up, "corrupted"))


def corrupted(method: Method, plot: Plot) -> Method:
    """The method, with liars among its workers."""
    return Corrupted(**{each.name: getattr(method, each.name) for each in fields(Method)}, plot=plot)
