"""The wire: numbers <-> bytes. What a row means and how long it is."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from dlion.layout import WORD, Bucket


@dataclass(frozen=True)
class Moment:
    """When and where a ballot is written: `t` verdicts were applied before; `rank` in a group of `workers`.

    t is an int; an i64[] for steps that are taken on the device.
    """

    t: Any
    rank: int
    workers: int = 1


@dataclass(frozen=True)
class Levels:
    """A verdict with few distinct values: element e has value `numerators[level(e)] / denominator`.

    Attributes:
        planes: i64[k, words], the level of each element as a binary number in bit planes, lowest bit first.
        numerators: one for each of the 2**k levels. denominator: positive.
    """

    planes: Tensor
    numerators: tuple[int, ...]
    denominator: int

    def table(self, lr: float) -> list[float]:
        """`lr * numerator / denominator` of each level, in float64."""
        return [lr * numerator / self.denominator for numerator in self.numerators]


class Encoder(Protocol):
    """Numbers -> bytes.

    Attributes:
        align: every tensor starts on a multiple of this many elements.
        bits: per element, for the size of a bucket.
    """

    align: int
    bits: int

    def encode(self, message: Any, bucket: Bucket, moment: Moment) -> Tensor:
        """What the rule says, most often f[bucket.size] -> T[planes, n]: i64 words, or numbers."""

    def blank(self, bucket: Bucket, answers: list[Tensor]) -> Tensor:
        """T[planes, n] that says nothing, as long as others' ballots after a survey with these answers."""


def blank_words(planes: int, bucket: Bucket) -> Tensor:
    """i64[planes, words] of zeros."""
    return torch.zeros(planes, bucket.words, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class SignBits:
    """One bit per element. A zero has no sign: its bit is a hash that the following step complements."""

    kernels: ModuleType
    align = WORD
    bits = 1

    def encode(self, message: Tensor, bucket: Bucket, moment: Moment) -> Tensor:
        """f[64*words] -> i64[1, words]; padding bits are 0."""
        words: Tensor = self.kernels.pack_signs(message, bucket.first_word, moment.t, moment.rank)
        if bucket.tails:
            index, mask = torch.tensor(bucket.tails, device=words.device).unbind(1)
            words[index] &= mask
        return words[None]

    def blank(self, bucket: Bucket, answers: list[Tensor]) -> Tensor:
        return blank_words(1, bucket)

    def decode(self, verdict: Tensor, voters: int) -> Levels:
        """i64[1, words] -> -1 or +1 of each element."""
        return Levels(verdict, (-1, 1), 1)


@dataclass(frozen=True)
class TernaryBits:
    """Two bits per element, the planes "nonzero" and "positive"."""

    kernels: ModuleType
    align = WORD
    bits = 2

    def encode(self, message: Tensor, bucket: Bucket, moment: Moment) -> Tensor:
        """f[64*words] -> i64[2, words]."""
        planes: Tensor = self.kernels.pack_ternary(message)
        return planes

    def blank(self, bucket: Bucket, answers: list[Tensor]) -> Tensor:
        return blank_words(2, bucket)

    def decode(self, verdict: Tensor, voters: int) -> Levels:
        """i64[2, words] -> -1, 0 or +1 of each element; level 2 (positive but zero) does not occur."""
        return Levels(verdict, (0, -1, 0, 1), 1)


@dataclass(frozen=True)
class CountPlanes:
    """How many voted +1, as `bit_length(workers)` bit planes."""

    def decode(self, verdict: Tensor, voters: int) -> Levels:
        """i64[k, words] -> `(2c - voters) / voters` for the count c; counts of more than all are taken for all."""
        return Levels(verdict, tuple(min(2 * c - voters, voters) for c in range(2 ** len(verdict))), voters)


@dataclass(frozen=True)
class SumPlanes:
    """The sum of ternary votes plus the number of voters, as `bit_length(2*workers)` bit planes."""

    def decode(self, verdict: Tensor, voters: int) -> Levels:
        """i64[k, words] -> `(s - voters) / voters` for the level s; sums of more than all are taken for all."""
        return Levels(verdict, tuple(min(s - voters, voters) for s in range(2 ** len(verdict))), voters)


@dataclass(frozen=True)
class Cast:
    """Full precision: float32, and float64 for a bucket that holds a float64 tensor."""

    align = 1
    bits = 32

    def encode(self, message: Tensor, bucket: Bucket, moment: Moment) -> Tensor:
        """f[n] -> f[1, n], the tensor itself."""
        return message[None]

    def blank(self, bucket: Bucket, answers: list[Tensor]) -> Tensor:
        return torch.zeros(1, bucket.size, dtype=bucket.dtype, device="cpu")

    def decode(self, verdict: Tensor, voters: int) -> Tensor:
        """The sum f[1, n] -> the mean f[n]."""
        return verdict[0] / voters
