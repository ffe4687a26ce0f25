"""EF-signSGD: signs with a scale, and what they could not say is said later (arXiv 1901.09847)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlion.baselines.descent import WIDE
from dlion.baselines.residual import allocate_own, state_of
from dlion.codecs import Moment
from dlion.layout import WORD, Bucket
from dlion.ops.bits import pack, unpack
from dlion.replica import Replica
from dlion.rules import Rule, signed_gradient


@dataclass(frozen=True)
class Scaled:
    """Signs, and one scale for each tensor.

    Attributes:
        positive: bool[bucket.size]; a zero counts as positive, and False in padding.
        scales: f[pieces].
    """

    positive: Tensor
    scales: Tensor


@dataclass(frozen=True)
class ScaledSigns:
    """One bit per element, and behind the bits of a bucket the scales of its tensors (float32; float64 where wide)."""

    align = WORD
    bits = 1

    def encode(self, message: Scaled, bucket: Bucket, moment: Moment) -> Tensor:
        """Scaled -> i64[1, words + scales]."""
        scales = torch.nn.functional.pad(message.scales.to(bucket.dtype), (0, len(message.scales) % 2))
        return torch.cat([pack(message.positive), scales.view(torch.int64)])[None]

    def blank(self, bucket: Bucket, answers: list[Tensor]) -> Tensor:
        no_bits = torch.zeros(bucket.size, dtype=torch.bool, device="cpu")
        nothing = Scaled(no_bits, torch.zeros(len(bucket.pieces), device="cpu"))
        return self.encode(nothing, bucket, Moment(0, 0))

    def decode(self, verdict: Tensor, voters: int) -> Tensor:
        """i64[workers, n], a relay of rows -> those of the voters, in rank order."""
        return verdict[:voters]


def mean_of(rows: Tensor, bucket: Bucket) -> Tensor:
    """f[bucket.size]: the mean over voters of sign times scale, added up in rank order."""
    total = torch.zeros(bucket.size, dtype=bucket.dtype, device=rows.device)
    for row in rows:
        signs = unpack(row[: bucket.words].clone()).to(bucket.dtype) * 2 - 1
        scales = row[bucket.words :].clone().view(bucket.dtype).tolist()
        for piece, scale in zip(bucket.pieces, scales, strict=False):  # an odd number of scales is filled up
            part = slice(piece.offset, piece.offset + piece.stop - piece.start)
            total[part] += signs[part] * scale
    return total / len(rows)


@dataclass(frozen=True)
class EFSign(Rule):
    """`p = lr*g + e`; said is `|p|_1/d * sign(p)` of each tensor, and e keeps what is left.

    The learning rate is inside the message, so that errors of different rates add up rightly.
    """

    kept = ("residual",)

    def defaults(self) -> dict[str, Any]:
        return {"lr": 0.01}  # the papers tune it for each task

    def allocate(self, replica: Replica) -> None:
        allocate_own(self, replica, self.kept)

    def message(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Scaled, bool]:
        wanted = [
            state_of(replica, piece, "residual") + signed_gradient(replica, piece) * replica.hyper(piece.slot)["lr"]
            for piece in bucket.pieces
        ]
        finite = all(bool(values.isfinite().all()) for values in wanted)
        positive = torch.zeros(bucket.size, dtype=torch.bool, device=wanted[0].device if wanted else "cpu")
        scales = torch.zeros(len(wanted), dtype=bucket.dtype, device=positive.device)
        if not finite:
            return Scaled(positive, scales), False
        for number, (piece, values) in enumerate(zip(bucket.pieces, wanted, strict=True)):
            scale = values.abs().double().mean().to(values.dtype)
            up = values >= 0
            positive[piece.offset : piece.offset + len(values)] = up
            scales[number] = scale
            state_of(replica, piece, "residual").copy_(values - torch.where(up, scale, -scale))
        return Scaled(positive, scales), True

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, moment: Moment) -> None:
        mean = mean_of(verdict, bucket)
        for piece in bucket.pieces:
            hyper, param = replica.hyper(piece.slot), replica.parameter(piece)
            wide = param.to(WIDE.get(param.dtype, param.dtype))
            step = mean[piece.offset : piece.offset + len(param)].to(param.device, wide.dtype)
            replica.write(piece, (wide * (1 - hyper["lr"] * hyper["weight_decay"]) - step).to(param.dtype))
