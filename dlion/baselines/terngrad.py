"""TernGrad: gradients as -1, 0 or +1 times a scale that all workers share (arXiv 1705.07878)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlion.codecs import Levels, Moment
from dlion.layout import Bucket, Piece
from dlion.ops.bits import MASK, levels, mix64
from dlion.replica import Replica
from dlion.rules import Gradient, Rule, gathered
from dlion.survey import Question, Questions

NOTE = "terngrad"


@dataclass(frozen=True)
class Scales:
    """Of each tensor this worker's own bound, f[tensors], the largest of all workers, and whether it is finite."""

    own: Tensor
    shared: Tensor
    finite: list[bool]


@dataclass(frozen=True)
class TernGrad(Rule):
    """Clipped gradients, rounded to -s, 0 or +s so that their mean stays; s is the largest scale of all workers.

    The paper's last layer in full precision is left out: an optimizer does not know which one it is.

    Args:
        descent: what is done with the mean.
    """

    descent: Gradient
    kept = ("momentum_buffer",)

    def defaults(self) -> dict[str, Any]:
        # clip: in standard deviations, the paper's; 0 leaves gradients as they are. seed: of the rounding
        return self.descent.defaults() | {"clip": 2.5, "seed": 0}

    def allocate(self, replica: Replica) -> None:
        self.descent.allocate(replica)

    def shared_state(self, replica: Replica) -> list[Tensor]:
        return self.descent.shared_state(replica)

    def survey(self, replica: Replica, moment: Moment) -> Questions:
        """One float for each tensor."""
        slots = range(len(replica.params))
        bounds = [bound(replica.gradient(replica.whole(slot)), replica.hyper(slot)["clip"]) for slot in slots]
        finite = [value is not None for value in bounds]
        own = torch.tensor([value or 0.0 for value in bounds], dtype=torch.float32, device="cpu")
        shared = yield Question("largest", own)
        replica.noted[NOTE] = Scales(own, shared, finite)

    def message(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, bool]:
        scales: Scales = replica.noted[NOTE]

        def say(piece: Piece) -> tuple[Tensor, Tensor]:
            grad = replica.gradient(piece)
            if not scales.finite[piece.slot]:  # all of the tensor, since its scale is not known
                return torch.zeros_like(grad), torch.zeros((), dtype=torch.bool, device=grad.device)
            own, shared = float(scales.own[piece.slot]), float(scales.shared[piece.slot])
            key = int(mix64(replica.hyper(piece.slot)["seed"], moment.t, 0)) & MASK
            clipped = grad.clamp(-own, own)
            lots = uniform(key, bucket.first + piece.offset, len(grad), moment.rank).to(grad.device)
            chosen = lots < clipped.abs().double() / shared  # a scale of 0 chooses nothing: 0/0 is not greater
            return torch.where(chosen, clipped.sign(), 0.0), torch.ones((), dtype=torch.bool, device=grad.device)

        return gathered(bucket, say)

    def apply(self, replica: Replica, bucket: Bucket, verdict: Levels, moment: Moment) -> None:
        scales: Scales = replica.noted[NOTE]
        table = [numerator / verdict.denominator for numerator in verdict.numerators]
        mean = torch.tensor(table, dtype=bucket.dtype, device=verdict.planes.device)[levels(verdict.planes).long()]
        for piece in bucket.pieces:
            mean[piece.offset : piece.offset + piece.stop - piece.start] *= float(scales.shared[piece.slot])
        self.descent.apply(replica, bucket, mean, moment)

    def finish(self, replica: Replica) -> None:
        self.descent.finish(replica)


def bound(grad: Tensor, clip: float) -> float | None:
    """`clip` standard deviations of the tensor, or its largest magnitude where that is 0; None where it is not finite.

    So a tensor of one element, which has no deviation, is said exactly.
    """
    if grad.numel() == 0:
        return 0.0
    values = grad.double()
    if not bool(values.isfinite().all()):
        return None
    limit = clip * float((values - values.mean()).square().mean().sqrt())
    return limit if limit > 0 else float(values.abs().max())


def uniform(key: int, first: int, count: int, rank: int) -> Tensor:
    """f64[count], each in [0, 1): pure functions of the key, the number of the element in the layout, and the rank.

    One hash serves two elements, 32 bits each; `first` is even, because pieces start on words.
    """
    pairs = torch.arange(first // 2, first // 2 + -(-count // 2), device="cpu")
    return mix64(key, pairs, rank).view(torch.int32)[:count].double() * 2.0**-32 + 0.5
