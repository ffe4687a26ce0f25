"""PowerSGD: gradients as products of two thin matrices (arXiv 1905.13727)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlion.baselines.residual import allocate_own, state_of
from dlion.codecs import Moment
from dlion.layout import Bucket, local
from dlion.replica import Replica
from dlion.rules import Gradient, Rule, state_tensors
from dlion.survey import Question, Questions

NOTE = "powersgd"
WORTH = 2  # times fewer numbers, or a matrix is sent whole: what torch's hook asks as well


@dataclass(frozen=True)
class Header:
    """Nothing but the header of a row: what is to be said was said in the survey."""

    align = 1
    bits = 32

    def encode(self, message: None, bucket: Bucket, moment: Moment) -> Tensor:
        """-> i64[1, 0]."""
        return torch.zeros(1, 0, dtype=torch.int64, device="cpu")

    def blank(self, bucket: Bucket, answers: list[Tensor]) -> Tensor:
        return self.encode(None, bucket, Moment(0, 0))

    def decode(self, verdict: Tensor, voters: int) -> None:
        """Nothing."""


@dataclass
class Approximation:
    """What all workers agreed on.

    Attributes:
        finite: whether this worker took part in it.
        factors: of a slot P f[n, r] with orthonormal columns, and Q f[m, r].
        whole: of every other slot the mean f[numel].
    """

    finite: bool
    factors: dict[int, tuple[Tensor, Tensor]]
    whole: dict[int, Tensor]


@dataclass(frozen=True)
class PowerSGD(Rule):
    """The mean gradient as `P Q^T` of low rank, by one power iteration from the Q of the step before; errors return.

    Matrices are a tensor's first dimension times all others; vectors, and matrices that two factors make less than
    twice as small, are sent whole. Factors travel as answers of the survey, and ballots are headers alone.

    Every worker computes the factors from the same sums. On processors whose products of matrices differ in the last
    bits replicas would not stay equal to the bit; all other methods' do.

    Args:
        descent: what is done with the mean.
    """

    descent: Gradient
    kept = ("momentum_buffer", "residual", "q")
    thin = ("q",)

    def defaults(self) -> dict[str, Any]:
        # rank: the paper's for image classification. seed: of the first Q
        return self.descent.defaults() | {"rank": 2, "seed": 0}

    def allocate(self, replica: Replica) -> None:
        self.descent.allocate(replica)
        allocate_own(self, replica, ("residual",))

    def shared_state(self, replica: Replica) -> list[Tensor]:
        return state_tensors(replica, without=("residual",))

    def survey(self, replica: Replica, moment: Moment) -> Questions:
        """Whether all ask for as much; then all P and the tensors sent whole; then all Q."""
        replica.noted.pop(NOTE, None)
        finite, targets = targets_of(replica)
        ranks = {slot: rank_of(replica, slot) for slot in targets}
        thin = [slot for slot, rank in ranks.items() if rank]
        thick = [slot for slot, rank in ranks.items() if not rank]
        bases = {slot: start(replica, slot, ranks[slot], targets[slot].dtype) for slot in thin}
        left = [targets[slot] @ bases[slot] for slot in thin]
        whole = [targets[slot] for slot in thick]
        took_part = torch.full((1,), float(finite), device="cpu")

        asked = joined([took_part, *left, *whole])
        size = torch.tensor([len(asked), -len(asked)], dtype=torch.float64, device="cpu")
        if float((yield Question("largest", size)).sum()) != 0:
            return  # ranks differ by mistake: the headers of the ballots tell everybody
        voted, *sums = parted((yield Question("sum", asked)), [took_part, *left, *whole])
        found = [orthogonal(total) for total in sums[: len(thin)]]
        right = [targets[slot].T @ p for slot, p in zip(thin, found, strict=True)]
        totals = parted((yield Question("sum", joined(right))), right)

        voters = float(voted)
        if voters == 0:
            return
        factors = {slot: (p, total / voters) for slot, p, total in zip(thin, found, totals, strict=True)}
        means = {slot: total / voters for slot, total in zip(thick, sums[len(thin) :], strict=True)}
        replica.noted[NOTE] = Approximation(finite, factors, means)
        for slot in thin:
            remember(replica, slot, bases[slot], factors[slot], targets[slot] if finite else None)

    def message(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[None, bool]:
        found: Approximation | None = replica.noted.get(NOTE)
        return None, found is not None and found.finite

    def apply(self, replica: Replica, bucket: Bucket, verdict: None, moment: Moment) -> None:
        found: Approximation = replica.noted.pop(NOTE)
        device = replica.params[0].device if replica.params else "cpu"
        mean = torch.zeros(bucket.size, dtype=bucket.dtype, device=device)
        for piece in bucket.pieces:
            part = found.whole.get(piece.slot)
            values = product(*found.factors[piece.slot]) if part is None else part
            mean[piece.offset : piece.offset + values.numel()] = values.reshape(-1)
        self.descent.apply(replica, bucket, mean, moment)

    def finish(self, replica: Replica) -> None:
        self.descent.finish(replica)


def targets_of(replica: Replica) -> tuple[bool, dict[int, Tensor]]:
    """Whether all is finite; and of each slot gradient plus residual as f[n, m], or 0 everywhere where it is not."""
    wide = any(param.dtype == torch.float64 for param in replica.params)
    dtype = torch.float64 if wide else torch.float32
    targets = {}
    for slot in range(len(replica.params)):
        every = replica.whole(slot)
        target = state_of(replica, every, "residual") + replica.gradient(every)
        targets[slot] = target.to(dtype).view(*shape_of(replica, slot))
    finite = all(bool(target.isfinite().all()) for target in targets.values())
    return finite, targets if finite else {slot: torch.zeros_like(target) for slot, target in targets.items()}


def shape_of(replica: Replica, slot: int) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix; a vector has one row."""
    here = local(replica.params[slot])
    rows = here.shape[0] if here.dim() > 1 and here.numel() else 1
    return rows, here.numel() // rows


def rank_of(replica: Replica, slot: int) -> int:
    """Columns of a tensor's factors; 0 where it is sent whole."""
    n, m = shape_of(replica, slot)
    rank: int = min(n, m, replica.hyper(slot)["rank"])
    return rank if (n + m) * rank * WORTH < n * m else 0


def start(replica: Replica, slot: int, rank: int, dtype: torch.dtype) -> Tensor:
    """f[m, rank]: the Q of the step before, orthonormal; at first normal numbers that all workers draw alike."""
    state = replica.state[replica.params[slot]]
    _, m = shape_of(replica, slot)
    if "q" not in state or state["q"].shape != (m, rank):
        draws = torch.Generator().manual_seed(replica.hyper(slot)["seed"] + slot)
        state["q"] = torch.randn(m, rank, generator=draws).to(replica.params[slot].device, dtype)
    return orthogonal(state["q"].to(dtype))


def remember(replica: Replica, slot: int, basis: Tensor, factors: tuple[Tensor, Tensor], target: Tensor | None) -> None:
    """Q for the next step, and what the factors did not say (target None: of a worker that took no part)."""
    state, (p, q) = replica.state[replica.params[slot]], factors
    # a column of zeros would stay one for ever
    state["q"] = torch.where((q != 0).any(0), q, basis).to(state["q"].dtype)
    if target is not None:
        residual = local(state["residual"])
        residual.copy_((target - product(p, q)).view(residual.shape))


def orthogonal(matrix: Tensor) -> Tensor:
    """f[n, r] with orthonormal columns that span the same, by the Gram-Schmidt process; a column of zeros stays."""
    columns: list[Tensor] = []
    for column in matrix.unbind(1):
        for other in columns:
            column = column - (other * column).sum() * other
        norm = column.norm()
        columns.append(column / norm if float(norm) > 0 else column)
    return torch.stack(columns, dim=1)


def product(p: Tensor, q: Tensor) -> Tensor:
    """`p @ q.T`, column after column, so that the bits are the same on all processors."""
    total = p[:, :1] * q[:, 0]
    for column in range(1, p.shape[1]):
        total = total + p[:, column, None] * q[:, column]
    return total


def joined(parts: list[Tensor]) -> Tensor:
    """One flat tensor of the dtype of the last part."""
    if not parts:
        return torch.zeros(0, device="cpu")
    return torch.cat([part.to(parts[-1].device, parts[-1].dtype).reshape(-1) for part in parts])


def parted(answer: Tensor, like: list[Tensor]) -> list[Tensor]:
    """What `joined` joined, in the shapes of `like`."""
    parts = torch.split(answer, [part.numel() for part in like])
    return [part.view(shape.shape) for part, shape in zip(parts, like, strict=True)]
