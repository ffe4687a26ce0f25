"""Every method as the model sees it: what it computes beside forward and backward, and what travels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from dlion.train.plan.cluster import Call
from dlion.train.plan.rates import NS, Rates
from dlion.train.plan.sizes import Sizes
from dlion.train.plan.votes import (
    FULL_BYTES,
    HEADER_BYTES,
    WORD_BITS,
    WORD_BYTES,
    Topology,
    Wire,
    longest_bucket,
    question,
    summed,
    voted,
)
from dlion.train.plan.work import Piece, Work

FIRST_DDP_BYTES = 2**20  # of DDP's first bucket, whatever bucket_cap_mb is
PAIR_BYTES = 8  # an index and a value
UNTIMED = "compression"


@dataclass(frozen=True)
class Scene:
    """What a method is asked about.

    Attributes:
        rank: of PowerSGD's factors. keep: share of the entries that sparse methods send.
        bucket_cap_mb: of DDP, in MiB. bucket_bytes: of dlion; None takes what the optimizer takes.
        on_device: whether steps of fused votes are taken on an accelerator.
    """

    sizes: Sizes
    workers: int
    rates: Rates
    topology: Topology = "auto"
    rank: int = 2
    keep: float = 0.04
    bucket_cap_mb: float = 25.0
    bucket_bytes: int | None = None
    on_device: bool = False

    @property
    def adamw(self) -> float:
        """Seconds of fused AdamW."""
        return self.sizes.parameters * self.rates.adamw * NS


def alone(scene: Scene) -> Work:
    """AdamW and no exchange."""
    return Work((), update=scene.adamw)


def ddp(scene: Scene, bytes_each: int, copied: float) -> Work:
    """DistributedDataParallel with fused AdamW. `copied`: bytes read and written for each parameter."""
    pieces = []
    longest = int(scene.bucket_cap_mb * 2**20) // FULL_BYTES
    first = min(scene.sizes.parameters, FIRST_DDP_BYTES // FULL_BYTES, longest)
    whole, rest = divmod(scene.sizes.parameters - first, longest)
    for count, length in ((1, first), (whole, longest), (1, rest)):
        if count * length:
            work = scene.rates.copied(copied * length)
            pieces.append((count, Piece(length, (Call("all-reduce", bytes_each * length),), work)))
    formula = 2 * (scene.workers - 1) / scene.workers * bytes_each * scene.sizes.parameters
    return Work(tuple(pieces), "queued", scene.adamw, formula)


def ddp_powersgd(scene: Scene) -> Work:
    """DDP with torch's PowerSGD hook in one bucket: tensors not worth it, then the factors P, then Q."""
    left, right, whole = scene.sizes.factors(scene.rank)
    calls = tuple(Call("all-reduce", FULL_BYTES * size) for size in (whole, left, right))
    formula = sum(call.sent(scene.workers, False) for call in calls)
    piece = Piece(scene.sizes.parameters, calls, scene.rates.copied(16 * scene.sizes.parameters))
    return Work(((1, piece),), "queued", scene.adamw, formula, UNTIMED)


def vote(up: int, down: Callable[[int], int], fused: bool, overlap: bool = False) -> Callable[[Scene], Work]:
    """A method that votes. `down`: planes of a verdict among so many workers."""

    def work(scene: Scene) -> Work:
        wire = Wire(up, down(scene.workers), fused)
        on_device = scene.on_device and fused
        longest = scene.bucket_bytes or longest_bucket(overlap, on_device)
        how = (wire, scene.topology, overlap, overlap and not on_device)  # there it is a few steps of many
        return voted(scene.sizes, scene.workers, *how, longest, scene.rates)

    return work


def full_precision(scene: Scene) -> Work:
    """The sum of gradients, then an optimizer like AdamW."""
    return summed(scene.sizes, scene.workers, scene.adamw, scene.bucket_bytes, scene.rates)


def sparse(scene: Scene) -> Work:
    """The largest entries of each tensor as values and indices, told to everybody; before that, how many there are."""
    kept = scene.sizes.kept(scene.keep)
    calls = (*question(1, 2 * FULL_BYTES, scene.workers), Call("all-gather", HEADER_BYTES + PAIR_BYTES * kept))
    work = scene.rates.copied(24 * scene.sizes.parameters)  # the residual is read, added to and written
    formula = (scene.workers - 1) * PAIR_BYTES * scene.keep * scene.sizes.parameters
    return Work(((1, Piece(scene.sizes.parameters, calls, work)),), "none", scene.adamw, formula, "selection")


def terngrad(scene: Scene) -> Work:
    """Two planes up, the sum down; before that, one scale of each tensor is agreed."""
    work = vote(2, _sums, fused=False)(scene)
    scales = Piece(0.0, question(scene.sizes.tensors, FULL_BYTES, scene.workers))
    return replace(work, pieces=((1, scales), *work.pieces), untimed="scales")


def ef_signsgd(scene: Scene) -> Work:
    """One bit, and a scale for each tensor, told to everybody."""
    sizes = scene.sizes
    words = sizes.aligned(WORD_BITS) // WORD_BITS + ceil(sizes.tensors * FULL_BYTES / WORD_BYTES)
    calls = (Call("all-gather", HEADER_BYTES + WORD_BYTES * words),)
    piece = Piece(sizes.parameters, calls, sizes.parameters * scene.rates.generic * NS)
    return Work(((1, piece),), formula=(scene.workers - 1) / 8 * sizes.parameters, untimed="scales")


def powersgd(scene: Scene) -> Work:
    """The factors P with the tensors that are not worth it, then Q, as sums; then headers alone."""
    left, right, whole = scene.sizes.factors(scene.rank)
    calls = [*question(2, 2 * FULL_BYTES, scene.workers), *question(1 + left + whole, FULL_BYTES, scene.workers)]
    calls += [*question(right, FULL_BYTES, scene.workers), Call("all-gather", HEADER_BYTES)]
    formula = 2 * (scene.workers - 1) / scene.workers * FULL_BYTES * (left + right + whole)
    piece = Piece(scene.sizes.parameters, tuple(calls), scene.rates.copied(24 * scene.sizes.parameters))
    return Work(((1, piece),), update=scene.adamw, formula=formula, untimed=UNTIMED)


def _one(workers: int) -> int:
    return 1


def _two(workers: int) -> int:
    return 2


def _counts(workers: int) -> int:
    return workers.bit_length()


def _sums(workers: int) -> int:
    return (2 * workers).bit_length()


majority_with_zeros, average_with_zeros = vote(2, _two, fused=True), vote(2, _sums, fused=True)

ALONE, BASE = "no communication", "ddp-fp32"
METHODS: dict[str, Callable[[Scene], Work]] = {
    ALONE: alone,
    BASE: lambda scene: ddp(scene, 4, 16.0),  # gradients into the bucket and back
    "ddp-fp16": lambda scene: ddp(scene, 2, 32.0),  # and halved, divided, widened
    "ddp-powersgd": ddp_powersgd,
    "g-adamw": full_precision,
    "g-lion": full_precision,
    "dlion-mavo": vote(1, _one, fused=True),
    "dlion-mavo, overlap": vote(1, _one, fused=True, overlap=True),
    "dlion-mavo, exact zeros": majority_with_zeros,
    "dlion-avg": vote(1, _counts, fused=True),
    "dlion-avg, overlap": vote(1, _counts, fused=True, overlap=True),
    "d-signum-mavo": vote(1, _one, fused=True),
    "d-signum-avg": vote(1, _counts, fused=True),
    "signsgd-mavo": vote(1, _one, fused=False),
    "terngrad": terngrad,
    "graddrop": sparse,
    "dgc": sparse,
    "ef-signsgd": ef_signsgd,
    "powersgd": powersgd,
}
