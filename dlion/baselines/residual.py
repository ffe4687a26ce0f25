"""Rules that send a few entries of what has piled up, and keep the rest for later."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlion.baselines.sparse import Entries, entries_kept, largest, mean_of
from dlion.codecs import Moment
from dlion.errors import ExchangeError
from dlion.layout import Bucket, Piece, local
from dlion.replica import Replica
from dlion.rules import Gradient, Rule, state_tensors
from dlion.survey import Question, Questions

WIDTH = "entries in a row"
WARMUP_STAGES = 4  # of falling keep rates, before the last one


def state_of(replica: Replica, piece: Piece, name: str) -> Tensor:
    """f[n], a view of this worker's own state."""
    own: Tensor = replica.state[replica.params[piece.slot]][name]
    return local(own).view(-1)[piece.start : piece.stop]


def allocate_own(rule: Rule, replica: Replica, names: tuple[str, ...]) -> None:
    """Zeros under these names for every trainable parameter that has none."""
    for param in replica.params:
        for name in names:
            if name not in replica.state[param]:
                replica.state[param][name] = torch.zeros_like(
                    param,
                    dtype=rule.momentum_dtype(param),
                    memory_format=torch.contiguous_format,
                    requires_grad=False,
                )


@dataclass(frozen=True)
class GradDrop(Rule):
    """Gradient dropping (arXiv 1704.05021): residuals grow by gradients, and the largest entries leave them.

    The paper estimates its threshold from a sample; here exactly the share `keep` is sent, since all workers must send
    rows of one length. The descent has a momentum of 0.9, because the paper names none.

    Args:
        descent: what is done with the mean.
    """

    descent: Gradient
    kept = ("momentum_buffer", "residual")
    own: ClassVar[tuple[str, ...]] = ("residual",)

    def defaults(self) -> dict[str, Any]:
        # keep: the paper drops 99 %. threshold: one for the whole model, as the authors' code has it
        return self.descent.defaults() | {"keep": 0.01, "threshold": "global"}

    def allocate(self, replica: Replica) -> None:
        self.descent.allocate(replica)
        allocate_own(self, replica, self.own)

    def shared_state(self, replica: Replica) -> list[Tensor]:
        return state_tensors(replica, without=self.own)

    def count(self, replica: Replica, moment: Moment, slot: int) -> int:
        """How many entries of a tensor are sent, if it has a threshold of its own."""
        return entries_kept(replica.hyper(slot)["keep"], local(replica.params[slot]).numel())

    def survey(self, replica: Replica, moment: Moment) -> Questions:
        """How long rows are: settings and t might differ by mistake, and rows of different lengths end the process."""
        total = sum(self.count(replica, moment, slot) for slot in range(len(replica.params)))
        longest = yield Question("largest", torch.tensor([total], dtype=torch.float64, device="cpu"))
        most = sum(local(param).numel() for param in replica.params)
        if not 0 <= float(longest) <= most:
            raise ExchangeError(
                f"a worker asks for rows of {float(longest):g} entries, and there are {most:,} parameters: use the "
                "same version of dlion everywhere, and look at what runs on the workers"
            )
        replica.noted[WIDTH] = int(longest)

    def message(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Entries, bool]:
        sums = self.accumulated(replica, bucket, moment)
        flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=sums[0].device if sums else "cpu")
        for piece, values in zip(bucket.pieces, sums, strict=True):
            flat[piece.offset : piece.offset + len(values)] = values
        width = replica.noted[WIDTH]
        if not bool(flat.isfinite().all()):
            nothing = flat[:0]
            return Entries(nothing.long(), nothing, width), False
        indices = self.chosen(replica, bucket, moment, flat)
        gone = torch.zeros(bucket.size, dtype=torch.bool, device=flat.device)
        gone[indices] = True
        for piece, values in zip(bucket.pieces, sums, strict=True):
            self.keep_rest(replica, piece, values, gone[piece.offset : piece.offset + len(values)])
        return Entries(indices, flat[indices], width), True

    def accumulated(self, replica: Replica, bucket: Bucket, moment: Moment) -> list[Tensor]:
        """Of each tensor what has piled up, this gradient included; nothing is moved yet."""
        return [state_of(replica, piece, "residual") + replica.gradient(piece) for piece in bucket.pieces]

    def chosen(self, replica: Replica, bucket: Bucket, moment: Moment, flat: Tensor) -> Tensor:
        """i64[k]: the entries to send."""
        counts = [self.count(replica, moment, piece.slot) for piece in bucket.pieces]
        if not bucket.pieces or replica.hyper(bucket.pieces[0].slot).get("threshold") == "global":
            return largest(flat, sum(counts))
        ends = [piece.offset + piece.stop - piece.start for piece in bucket.pieces]
        return torch.cat(
            [
                largest(flat[piece.offset : end], count) + piece.offset
                for piece, end, count in zip(bucket.pieces, ends, counts, strict=True)
            ]
        )

    def keep_rest(self, replica: Replica, piece: Piece, values: Tensor, gone: Tensor) -> None:
        """Move this worker's state: what is sent is `gone`."""
        state_of(replica, piece, "residual").copy_(torch.where(gone, 0.0, values))

    def apply(self, replica: Replica, bucket: Bucket, verdict: list[Entries], moment: Moment) -> None:
        self.descent.apply(replica, bucket, mean_of(verdict, bucket), moment)

    def finish(self, replica: Replica) -> None:
        self.descent.finish(replica)


@dataclass(frozen=True)
class DGC(GradDrop):
    """Deep gradient compression (arXiv 1712.01887): what piles up is momentum, `u = momentum*u + g; v = v + u`.

    Local clipping before that, to `clip / sqrt(workers)`; the largest entries of v of each tensor are sent, and u and v
    set to 0 there (factor masking). The descent with the mean is plain: momentum is inside already. The paper estimates
    its thresholds from a sample; here they are exact.
    """

    kept = ("residual", "velocity")
    own = ("residual", "velocity")

    def defaults(self) -> dict[str, Any]:
        # clip: off, for the paper gives one for each task. warmup: the paper's is 4 epochs, which an optimizer cannot
        # count in steps
        return self.descent.defaults() | {"momentum": 0.9, "keep": 0.001, "clip": 0.0, "warmup": 0}

    def count(self, replica: Replica, moment: Moment, slot: int) -> int:
        hyper = replica.hyper(slot)
        rate = keep_rate(hyper["keep"], hyper["warmup"], moment.t)
        return entries_kept(rate, local(replica.params[slot]).numel())

    def accumulated(self, replica: Replica, bucket: Bucket, moment: Moment) -> list[Tensor]:
        clipped = self._clipped(replica, bucket, moment)
        moved = []
        for piece, grad in zip(bucket.pieces, clipped, strict=True):
            velocity = state_of(replica, piece, "velocity") * replica.hyper(piece.slot)["momentum"] + grad
            moved.append(velocity)
        replica.noted["velocity"] = dict(zip(bucket.slots, moved, strict=True))
        return [
            state_of(replica, piece, "residual") + velocity
            for piece, velocity in zip(bucket.pieces, moved, strict=True)
        ]

    def keep_rest(self, replica: Replica, piece: Piece, values: Tensor, gone: Tensor) -> None:
        super().keep_rest(replica, piece, values, gone)
        velocity = replica.noted["velocity"].pop(piece.slot)
        state_of(replica, piece, "velocity").copy_(torch.where(gone, 0.0, velocity))

    def _clipped(self, replica: Replica, bucket: Bucket, moment: Moment) -> list[Tensor]:
        """The gradients, scaled down to the largest norm that one of so many workers may have."""
        grads = [replica.gradient(piece).to(self.momentum_dtype(replica.params[piece.slot])) for piece in bucket.pieces]
        norm = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
        scaled = []
        for piece, grad in zip(bucket.pieces, grads, strict=True):
            limit = replica.hyper(piece.slot)["clip"] / moment.workers**0.5
            scaled.append(grad * (limit / norm) if 0 < limit < norm else grad)
        return scaled


def keep_rate(keep: float, warmup: int, t: int) -> float:
    """The share that is sent in step t: `keep`, and before that four equal stages of falling powers of it.

    With keep=0.001 they are 25 %, 6.3 %, 1.6 % and 0.4 %, the paper's.
    """
    stage = t * WARMUP_STAGES // warmup if t < warmup else WARMUP_STAGES
    return keep if stage == WARMUP_STAGES else float(keep ** ((stage + 1) / (WARMUP_STAGES + 1)))
