"""The exchange of an elastic group: a row that is not like the others' abstains, and nobody else stops for it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dlion.codecs import Moment
from dlion.exchange import Exchange, Reading
from dlion.header import BallotHeader, Status, VerdictHeader, judge_tolerantly
from dlion.layout import Bucket
from dlion.pipeline import Steps
from dlion.replica import Replica
from dlion.tallies import Tally
from dlion.topology import Tally as AnyTally
from dlion.voting import Voting

Ballots = list[tuple[Tensor, Status]]  # of every bucket, in the order that all workers send them


class TolerantTally:
    """Counts what the majority calls this bucket of this step, whatever this worker itself takes it for."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    @property
    def verdict_planes(self) -> int:
        return self._tally.verdict_planes

    def judge(self, headers: Tensor) -> tuple[Tensor, list[int]]:
        said = [BallotHeader.decode(row) for row in headers.tolist()]
        verdict, voters, usual = judge_tolerantly(said, self._tally.own)
        self._tally = replace(self._tally, own=usual)
        if self._tally.observer is not None:
            self._tally.observer.voters = voters
        return verdict.encode().to(headers.device), voters

    def count(self, ballots: Tensor, voters: list[int], shard: int) -> Tensor:
        return self._tally.count(ballots, voters, shard)

    def width(self, ballot_width: int) -> int:
        return self._tally.width(ballot_width)


class ElasticExchange(Exchange):
    """The workers of one round. They agreed on layout and parameters when they came together, and may do so again."""

    def ballots(self, steps: Steps) -> Ballots:
        """This worker's ballots of the step, made by the rule: momentum moves."""
        made = []
        for bucket in self.order:
            planes, finite = steps.ballot(self.replica, bucket, self.moment)
            # on the CPU or wherever the rule left them: they may be sent again in another group
            made.append((planes, Status.OK if finite else Status[self.options.nonfinite.upper()]))
        return made

    def blanks(self, status: Status) -> Ballots:
        """As many ballots that say nothing: momentum rests."""
        return [(self.wire.up.blank(bucket, []), status) for bucket in self.order]

    def consult(self, ballots: Ballots) -> list[Reading]:
        """Send all ballots and wait for all verdicts.

        Raises:
            ExchangeError: a worker was lost, and it is not known which verdicts others received.
        """
        for bucket, (planes, status) in zip(self.order, ballots, strict=True):
            self._send(bucket, planes, status)
            self.flight.advance()
        return list(self._received())

    def _received(self) -> Iterator[Reading]:
        while self.flight:
            consulted = self.flight.receive()
            assert consulted.result is not None
            headers, verdict = consulted.result
            header = max((VerdictHeader.decode(row) for row in headers.tolist()), key=lambda one: one.status)
            self.stats.abstentions += header.abstentions
            yield consulted.bucket, verdict, header

    def tally(self, own: BallotHeader, bucket: Bucket, shard_words: int) -> AnyTally:
        counting = super().tally(own, bucket, shard_words)
        assert isinstance(counting, Tally)
        return TolerantTally(counting)

    def _agree(self, voting: Voting, shared: list[Tensor]) -> None:
        """Nothing: the workers compared all this when they came together."""


@dataclass(frozen=True)
class Held:
    """The verdicts of a step that are not applied yet, and everything needed to apply them later.

    Attributes:
        round: that decided them. steps, moment, hypers: how and when the step was taken.
    """

    round: int
    readings: list[Reading]
    steps: Steps
    moment: Moment
    hypers: list[dict[str, Any]]

    def apply(self, replica: Replica) -> bool:
        """Do with the parameters what was decided; whether anything moved."""
        replica.hypers = self.hypers
        nobody_moves = any(header.status == Status.SKIP for _, _, header in self.readings)
        voted = [] if nobody_moves else [reading for reading in self.readings if reading[2].voters]
        for bucket, verdict, header in voted:
            self.steps.apply(replica, bucket, verdict, header.voters, self.moment)
        self.steps.finish(replica)
        return bool(voted)
