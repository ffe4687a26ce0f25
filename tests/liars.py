"""Workers that lie, among real ones: what a worker says is changed between its pipeline and the network."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dlion import Distributed
from dlion.codecs import Moment
from dlion.layout import Bucket
from dlion.pipeline import Steps, Wire
from dlion.replica import Replica
from dlion.simulate.attacks import attack_on
from dlion.simulate.faults import COLLUDING, INVERTED, RANDOM
from dlion.survey import Questions


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
class Lying:
    """`steps` of a worker with a fault (one of the simulator's attacks, or None for an honest one).

    honest: the ranks that are.
    """

    steps: Steps
    act: str | None
    board: Board
    honest: Sequence[int]
    method: str

    @property
    def wire(self) -> Wire:
        return self.steps.wire

    def survey(self, replica: Replica, moment: Moment) -> Questions:
        return self.steps.survey(replica, moment)

    def ballot(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, bool]:
        planes, finite = self.steps.ballot(replica, bucket, moment)
        attack = attack_on(self.wire.up, self.method)
        if self.act == INVERTED:
            planes = attack.inverted(planes, bucket)
        elif self.act == RANDOM:
            planes = attack.random(planes, bucket, moment.t, moment.rank)
        elif self.act == COLLUDING:
            seen = self.board.of(moment.t, bucket.number, self.honest)
            planes = attack.inverted(attack.agreed(seen, bucket, moment.t), bucket)
        else:
            self.board.post(moment.t, bucket.number, moment.rank, planes)
        return planes, finite

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, voters: int, moment: Moment) -> None:
        self.steps.apply(replica, bucket, verdict, voters, moment)

    def finish(self, replica: Replica) -> None:
        self.steps.finish(replica)


def corrupt(optimizer: Distributed, act: str | None, board: Board, honest: Sequence[int]) -> None:
    """Let a worker lie from its first step on; honest ones (act None) only have their ballots read."""
    renewal: Any = optimizer._renewal
    agreed = renewal._agreed

    def lying(group: Any) -> Any:
        exchange = agreed(group)
        renewal._steps = Lying(renewal._steps, act, board, honest, optimizer.method)
        return exchange

    renewal._agreed = lying
