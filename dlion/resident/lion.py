"""The three verbs of Lion's votes on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from types import ModuleType
from typing import Any

from torch import Tensor

from dlion.codecs import Moment
from dlion.layout import Bucket
from dlion.ops.memory import those
from dlion.pipeline import Wire
from dlion.replica import Replica
from dlion.resident import by_torch
from dlion.resident.scalars import ResidentMoment
from dlion.rules import ROUNDING_SEED
from dlion.survey import Questions


@dataclass(frozen=True)
class ResidentLion:
    """`dlion.pipeline.FusedLion` for numbers that lie on the device: t, voters, lr and weight decay are tensors there.

    Args:
        kernels: as `choice.kernels_for` gives them.
        wire, zeros, rounding, betas: as there.
    """

    kernels: ModuleType
    wire: Wire
    zeros: str
    rounding: str
    betas: Callable[[dict[str, Any]], tuple[float, float]] = itemgetter("betas")

    def survey(self, replica: Replica, moment: Moment) -> Questions:
        yield from ()

    def ballot(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, Tensor]:
        """The bucket's ballot, and bool[]: whether the gradients were finite."""
        groups = replica.hypers
        betas = [self.betas(group) for group in groups]
        words, finite = self.kernels.ballot(
            replica.gradients(bucket),
            replica.momenta(bucket),
            bucket.offsets,
            bucket.groups,
            bucket.size,
            [first for first, _ in betas],
            [second for _, second in betas],
            [group["maximize"] for group in groups],
            bucket.first_word,
            moment.t,
            moment.rank,
            self.zeros,
            replica.awake,
        )
        return words, finite

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, voters: Tensor, moment: Moment) -> None:
        """Do with the parameters what `voters`, i64[], decided; nothing where it is 0."""
        assert isinstance(moment, ResidentMoment)
        params = replica.parameters(bucket)
        known = list(map(self.kernels.knows, params))
        for covered, kernels in ((True, self.kernels), (False, by_torch)):
            if covered in known:
                mine, offsets, groups = those(known, covered, params, bucket.offsets, bucket.groups)
                numbers = kernels.numbers(self.wire.down, len(verdict), voters, moment.applied)
                when = (self.rounding, bucket.first_word, moment.t, ROUNDING_SEED)
                kernels.apply_there(mine, verdict, offsets, groups, numbers, *when)
        for k in bucket.cut:  # a copy where the tensor is not contiguous
            replica.write(bucket.pieces[k], params[k].detach())

    def finish(self, replica: Replica) -> None:
        pass
