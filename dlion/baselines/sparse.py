"""The largest entries alone: how they are chosen, and how they travel."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dlion.codecs import Moment
from dlion.errors import ExchangeError
from dlion.layout import Bucket

INDEXED = 2**31  # elements that an index of 32 bits can tell apart


@dataclass(frozen=True)
class Entries:
    """Some entries of a bucket.

    Attributes:
        indices: i64[k], of elements of the bucket, each at most once. values: f[k].
        width: how many entries a row holds, at least k and the same on all workers.
    """

    indices: Tensor
    values: Tensor
    width: int


@dataclass(frozen=True)
class Pairs:
    """Entries as a plane of 32-bit indices and one of float32 values (both of 64 bits in a bucket of float64).

    A row is filled up with the value 0 for element 0.
    """

    align = 1
    bits = 64

    def encode(self, message: Entries, bucket: Bucket, moment: Moment) -> Tensor:
        """Entries -> i32[2, width], or i64."""
        if bucket.size >= INDEXED:
            raise ValueError(f"indices of 32 bits cannot tell {bucket.size:,} parameters apart: use another method")
        rows = self._empty(message.width, bucket).to(message.values.device)
        count = len(message.indices)
        rows[0, :count] = message.indices
        rows[1, :count] = message.values.to(bucket.dtype).view(rows.dtype)
        return rows

    def blank(self, bucket: Bucket, answers: list[Tensor]) -> Tensor:
        longest = float(answers[0]) if answers else -math.inf  # nobody was asked, or nobody asks for any
        return self._empty(max(0, int(longest)) if math.isfinite(longest) else 0, bucket)

    def decode(self, verdict: Tensor, voters: int) -> list[Entries]:
        """i32[2*workers, width], a relay of rows -> the entries of each voter, in rank order."""
        numbers = torch.float64 if verdict.dtype == torch.int64 else torch.float32
        rows = verdict[: 2 * voters].view(voters, 2, -1)
        return [Entries(row[0].long(), row[1].view(numbers), rows.shape[2]) for row in rows]

    @staticmethod
    def _empty(width: int, bucket: Bucket) -> Tensor:
        integers = torch.int64 if bucket.dtype == torch.float64 else torch.int32
        return torch.zeros(2, width, dtype=integers, device="cpu")


def mean_of(said: list[Entries], bucket: Bucket) -> Tensor:
    """f[bucket.size]: the mean over voters, added up in rank order; an entry that nobody sent is 0.

    Raises:
        ExchangeError: an entry lies outside the bucket.
    """
    for entries in said:
        strange = entries.indices[(entries.indices < 0) | (entries.indices >= bucket.size)]
        if len(strange):
            raise ExchangeError(
                f"a worker sent a value for element {int(strange[0])} of a bucket that has {bucket.size:,}: use the "
                "same version of dlion everywhere, and look at what runs on the workers"
            )
    total = torch.zeros(bucket.size, dtype=bucket.dtype, device=said[0].values.device)
    for entries in said:
        total.index_add_(0, entries.indices, entries.values.to(bucket.dtype))
    return total / len(said)


def entries_kept(keep: float, numel: int) -> int:
    """How many of `numel` entries are kept: the share `keep`, rounded up."""
    return min(numel, math.ceil(keep * numel))


def largest(values: Tensor, count: int) -> Tensor:
    """i64[count], ascending: where the magnitudes of f[n] are largest; of equal ones those that come first.

    torch.topk alone may take any of the equal ones, and other processors other ones.
    """
    sizes = values.abs()
    if count == 0:
        return torch.zeros(0, dtype=torch.int64, device=values.device)
    least = sizes.topk(count).values[-1]
    chosen = sizes > least
    equal = (sizes == least).nonzero()[:, 0]
    chosen[equal[: count - int(chosen.sum())]] = True
    return chosen.nonzero()[:, 0]
