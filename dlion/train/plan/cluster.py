"""What a collective call takes among workers on nodes: the alpha-beta model with two kinds of links.

    seconds of a call = hops * latency + messages * overhead + bytes over the busiest link / its rate

Every worker has a link of its own inside its node; all workers of a node share one link to the other nodes. Links carry
both directions at full rate, nothing is lost or queued, and every worker comes to the call at the same time.
"""

from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

Kind = Literal["all-to-all", "all-gather", "all-reduce", "gather", "send-out"]


@dataclass(frozen=True)
class Link:
    """`latency`: seconds of one hop with a small message; `rate`: bytes per second in each direction."""

    latency: float
    rate: float


@dataclass(frozen=True)
class Backend:
    """How the network library makes its calls.

    Attributes:
        trees: an all-reduce takes the quicker of a ring and a double binary tree; else always a ring.
        lanes: calls of one process group that are under way at once.
        direct_bytes: up to this length an all-gather of dlion sends a row to everybody directly; else around a ring.
    """

    name: str
    trees: bool
    lanes: int
    direct_bytes: int


GLOO = Backend("gloo", trees=False, lanes=2, direct_bytes=2**16)
NCCL = Backend("nccl", trees=True, lanes=1, direct_bytes=0)
BACKENDS = {backend.name: backend for backend in (GLOO, NCCL)}


@dataclass(frozen=True)
class Call:
    """One collective call. `row`: bytes that one worker has for one other, or the whole tensor of an all-reduce."""

    kind: Kind
    row: float

    def sent(self, workers: int, server: bool) -> float:
        """Bytes that a worker sends; the server is the one that gathers and sends out."""
        if self.kind == "all-reduce":
            return 2 * (workers - 1) / workers * self.row
        if self.kind == "gather":
            return 0.0 if server or workers == 1 else self.row
        if self.kind == "send-out" and not server:
            return 0.0
        return (workers - 1) * self.row


@dataclass(frozen=True)
class Cost:
    """Seconds of a call: `latency`, in which others may use the link, and `transfer`, in which they may not."""

    latency: float
    transfer: float

    @property
    def seconds(self) -> float:
        """Of the call alone."""
        return self.latency + self.transfer


NOTHING = Cost(0.0, 0.0)


@dataclass(frozen=True)
class Cluster:
    """Workers, and what joins them.

    Attributes:
        per_node: workers of a node; fewer than that are one node.
        inside: the link of a worker inside its node. between: the one that a node's workers share.
        overhead: seconds that a worker spends on each message of a call that talks to everybody.
    """

    workers: int
    per_node: int
    inside: Link
    between: Link
    overhead: float
    backend: Backend

    @property
    def in_node(self) -> int:
        """Workers of a full node."""
        return min(self.per_node, self.workers)

    @property
    def nodes(self) -> int:
        """The last one may have fewer workers."""
        return ceil(self.workers / self.in_node)

    def cost(self, call: Call) -> Cost:
        """Seconds of a call."""
        if self.workers == 1:
            return NOTHING
        if call.kind == "all-reduce":
            return self._all_reduce(call.row)
        if call.kind == "all-to-all":
            return self._direct(call.row, self.in_node)
        if call.kind == "all-gather":
            direct = self.workers == 2 or call.row <= self.backend.direct_bytes
            return self._direct(call.row, self.in_node) if direct else self._ring(call.row, self.workers - 1)
        return self._direct(call.row, 1)  # the server's link is the busiest

    def _direct(self, row: float, senders: int) -> Cost:
        """`senders` workers of a node talk to everybody, or everybody to them."""
        inside = (self.in_node - 1) * row / self.inside.rate
        across = senders * (self.workers - self.in_node) * row / self.between.rate
        return Cost(self._hop.latency + (self.workers - 1) * self.overhead, max(inside, across))

    def _ring(self, row: float, hops: int) -> Cost:
        """Rows pass from neighbour to neighbour, so that a node's link carries one flow."""
        return Cost(hops * self._hop.latency, hops * row / self._slowest)

    def _all_reduce(self, row: float) -> Cost:
        ring = self._ring(row / self.workers, 2 * (self.workers - 1))
        if not self.backend.trees:
            return ring
        hops = ceil(log2(self.nodes)) * self.between.latency + (self.in_node - 1) * self.inside.latency
        tree = Cost(2 * hops, 2 * row / self._slowest)
        return min(ring, tree, key=lambda cost: cost.seconds)

    @property
    def _hop(self) -> Link:
        """Workers wait for the slowest hop."""
        return self.between if self.nodes > 1 else self.inside

    @property
    def _slowest(self) -> float:
        """Bytes per second of a ring."""
        rates = [self.between.rate] * (self.nodes > 1) + [self.inside.rate] * (self.in_node > 1)
        return min(rates)
