"""Votes with the sign of a gradient, of now or averaged over time."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dlion.codecs import Moment
from dlion.layout import Bucket
from dlion.replica import Replica
from dlion.rules import Lion, finite_or_zero, gathered, signed_gradient


@dataclass(frozen=True)
class Signum(Lion):
    """`m = momentum*m + (1 - momentum)*g`, and the vote is the sign of the new m (D-SIGNUM of arXiv 2404.00438).

    It is Lion with two equal betas. `momentum` is 0.99, as in that paper; signSGD's authors take 0.9 (1810.05291).
    """

    def defaults(self) -> dict[str, Any]:
        return {"lr": 1e-4, "momentum": 0.99}

    def betas(self, hyper: dict[str, Any]) -> tuple[float, float]:
        return hyper["momentum"], hyper["momentum"]


@dataclass(frozen=True)
class SignSGD(Lion):
    """The vote is the sign of the gradient (signSGD with majority vote, arXiv 1810.05291)."""

    def defaults(self) -> dict[str, Any]:
        return {"lr": 1e-4}

    def allocate(self, replica: Replica) -> None:
        for param in replica.params:
            replica.state[param]  # an empty entry: there is nothing to remember

    def message(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, bool]:
        return gathered(bucket, lambda piece: finite_or_zero(signed_gradient(replica, piece)))
