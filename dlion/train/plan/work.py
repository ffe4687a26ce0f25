"""A step as buckets that are made, travel and are applied, and when it is over."""

from dataclasses import dataclass
from typing import Literal

from dlion.train.plan.cluster import Call, Cluster

Overlap = Literal["none", "queued", "pipelined"]


@dataclass(frozen=True)
class Compute:
    """`forward` and `backward`: seconds of the slowest worker, with nothing of the optimizer and of the network."""

    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Piece:
    """A bucket.

    Attributes:
        parameters: how many, for the moment of the backward pass in which its gradients are there.
        calls: one after another.
        before: seconds of this worker's work before the calls. after: between and after them.
    """

    parameters: float
    calls: tuple[Call, ...]
    before: float = 0.0
    after: float = 0.0


@dataclass(frozen=True)
class Work:
    """What a method adds to forward and backward.

    Attributes:
        pieces: (how many alike, bucket), in the order in which they leave.
        overlap: "none": all calls come after the backward pass, one after another. "queued": a bucket's calls begin as
            soon as its gradients are there and those of earlier buckets are over. "pipelined": so too, but calls wait
            only for the link, and for one of their group's lanes; each call of a bucket has its own group.
        update: seconds of the optimizer beside the buckets.
        formula: bytes by the published formula, without headers and padding; None where there is none.
        untimed: arithmetic that was never measured, so that the step is a lower bound; "" where there is none.
    """

    pieces: tuple[tuple[int, Piece], ...]
    overlap: Overlap = "none"
    update: float = 0.0
    formula: float | None = None
    untimed: str = ""


@dataclass(frozen=True)
class Step:
    """Seconds and bytes of one step.

    Attributes:
        compute: forward and backward.
        local: what else the worker works.
        exchange: the calls, if nothing hid them.
        exposed: the part of them for which the worker stands still.
        sent: bytes of the worker that sends most.
        calls: collective calls.
    """

    compute: float
    local: float
    exchange: float
    exposed: float
    sent: float
    calls: int

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.local + self.exposed


def step_of(work: Work, cluster: Cluster, compute: Compute) -> Step:
    """What the model says of a step."""
    before = sum(count * piece.before for count, piece in work.pieces)
    after = sum(count * piece.after for count, piece in work.pieces)
    exchange = sum(count * _seconds(piece, cluster) for count, piece in work.pieces)
    exposed = exchange
    if work.overlap != "none":
        exposed = min(exchange, _exposed(work, cluster, compute.backward, before))
    return Step(
        compute=compute.seconds,
        local=before + after + work.update,
        exchange=exchange,
        exposed=exposed,
        sent=max(_sent(work, cluster, server) for server in (False, True)),
        calls=sum(count * len(piece.calls) for count, piece in work.pieces),
    )


def _exposed(work: Work, cluster: Cluster, backward: float, before: float) -> float:
    """How much later than the backward pass the last call ends.

    Buckets wait for the link in turn, so the end is the latest of these over all buckets: the moment at which it is
    there, plus all that has to travel from it on. Among buckets alike that is the first's or the last's.
    """
    parameters = sum(count * piece.parameters for count, piece in work.pieces)
    to_travel = sum(count * _occupied(work, piece, cluster) for count, piece in work.pieces)
    moment = end = 0.0
    for count, piece in work.pieces:
        ready = backward * piece.parameters / parameters + piece.before if parameters else piece.before
        occupied = _occupied(work, piece, cluster)
        first = moment + ready + to_travel
        moment += count * ready
        to_travel -= count * occupied
        end = max(end, first, moment + occupied + to_travel)
    if work.pieces:
        last = work.pieces[-1][1]
        end += _seconds(last, cluster) - _occupied(work, last, cluster)
    return max(0.0, end - backward - before)


def _occupied(work: Work, piece: Piece, cluster: Cluster) -> float:
    """Seconds for which a bucket keeps later ones waiting."""
    if work.overlap == "queued":
        return _seconds(piece, cluster)
    costs = [cluster.cost(call) for call in piece.calls]
    busiest = max((cost.seconds for cost in costs), default=0.0)
    return max(sum(cost.transfer for cost in costs), busiest / cluster.backend.lanes)


def _seconds(piece: Piece, cluster: Cluster) -> float:
    return sum(cluster.cost(call).seconds for call in piece.calls)


def _sent(work: Work, cluster: Cluster, server: bool) -> float:
    return sum(count * call.sent(cluster.workers, server) for count, piece in work.pieces for call in piece.calls)
