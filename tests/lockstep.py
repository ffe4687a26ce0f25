"""Workers that vote without a network, in lockstep: dlion's own ballot, tally and apply, and nothing between them.

For what needs thousands of steps or hundreds of workers. That it takes the steps of a real world is a test of
test_theory.py.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlion.codecs import CountPlanes, Moment, SignBits
from dlion.layout import WORD, Layout
from dlion.ops import choose
from dlion.pipeline import FusedLion, Wire
from dlion.replica import Replica
from dlion.tallies import Majority, Votes

VOTES = ("majority", "average")


def lion(vote: str, workers: int) -> FusedLion:
    """Ballot, tally and apply of Distributed Lion among so many workers."""
    kernels = choose("auto")[1]
    signs = SignBits(kernels)
    if vote == "majority":
        wire = Wire(signs, Majority(kernels, "rotate"), signs)
    else:
        wire = Wire(signs, Votes(kernels, workers), CountPlanes())
    return FusedLion(kernels, wire, "balanced", "nearest")


class Lockstep:
    """Workers with one tensor of parameters, which they all hold, and a momentum each.

    Attributes:
        point: f[d], the parameters.
        momenta: of each worker, f[d].
        t: steps taken.
    """

    def __init__(self, start: Tensor, workers: int, steps: FusedLion, **hyper: Any) -> None:
        self._param = torch.nn.Parameter(start.clone())
        self._steps = steps
        self._groups = [{"params": [self._param], "maximize": False, "betas": (0.9, 0.99)} | hyper]
        (self._bucket,) = Layout.of(self._groups, WORD * (start.numel() // WORD + 1), WORD).buckets
        self._replicas = []
        for _ in range(workers):
            replica = Replica(self._groups, defaultdict(dict))
            replica.allocate_momentum(lambda param: param.dtype)
            replica.hypers = self._groups
            self._replicas.append(replica)
        self.point = self._param.detach()
        self.momenta = [replica.state[self._param]["exp_avg"] for replica in self._replicas]
        self.t = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step, with each worker's gradient."""
        ballots = []
        for rank, (replica, gradient) in enumerate(zip(self._replicas, gradients, strict=True)):
            self._param.grad = gradient
            ballots.append(self._steps.ballot(replica, self._bucket, Moment(self.t, rank))[0])
        verdict = self._steps.wire.count(torch.stack(ballots), 0, self.t)
        replica = self._replicas[0]
        self._steps.apply(replica, self._bucket, verdict, len(ballots), Moment(self.t, 0))
        self.t += 1
