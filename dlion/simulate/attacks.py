"""What attackers send, for each form of ballot whose signs mean something by themselves."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dlion.codecs import Cast, Encoder, SignBits, TernaryBits
from dlion.layout import Bucket
from dlion.ops.bits import mix64
from dlion.tallies import Majority, TernaryMajority

RANDOM_KEYS = 2**61  # plus the rank in the middle of a hash; ranges of other uses: `MOMENTUM_KEYS` of ops/reference.py


class Attack(Protocol):
    """The signs of a ballot T[planes, n], changed."""

    def inverted(self, planes: Tensor, bucket: Bucket) -> Tensor:
        """The opposite of what it says."""

    def random(self, planes: Tensor, bucket: Bucket, step: int, rank: int) -> Tensor:
        """Random signs, a function of (step, rank, element)."""

    def agreed(self, honest: Sequence[Tensor], bucket: Bucket, t: int) -> Tensor:
        """What these ballots decide among themselves, as a ballot."""


class OfSigns:
    """Attacks on one bit per element."""

    def __init__(self, up: SignBits) -> None:
        self._count = Majority(up.kernels, "rotate")

    def inverted(self, planes: Tensor, bucket: Bucket) -> Tensor:
        return _without_padding(~planes, bucket)

    def random(self, planes: Tensor, bucket: Bucket, step: int, rank: int) -> Tensor:
        return _without_padding(_random_words(planes.shape[1], bucket.first_word, step, rank)[None], bucket)

    def agreed(self, honest: Sequence[Tensor], bucket: Bucket, t: int) -> Tensor:
        return _without_padding(self._count(torch.stack(list(honest)), bucket.first_word, t), bucket)


class OfTernary:
    """Attacks on -1, 0 or +1 per element. Random ones never abstain."""

    def __init__(self, up: TernaryBits) -> None:
        self._count = TernaryMajority(up.kernels, "rotate")

    def inverted(self, planes: Tensor, bucket: Bucket) -> Tensor:
        return torch.stack([planes[0], planes[0] & ~planes[1]])

    def random(self, planes: Tensor, bucket: Bucket, step: int, rank: int) -> Tensor:
        words = _random_words(planes.shape[1], bucket.first_word, step, rank)
        return _without_padding(torch.stack([torch.full_like(words, -1), words]), bucket)

    def agreed(self, honest: Sequence[Tensor], bucket: Bucket, t: int) -> Tensor:
        return self._count(torch.stack(list(honest)), bucket.first_word, t)


class OfNumbers:
    """Attacks on full-precision numbers: sizes stay, signs change; what the honest decide is their mean."""

    def inverted(self, planes: Tensor, bucket: Bucket) -> Tensor:
        return -planes

    def random(self, planes: Tensor, bucket: Bucket, step: int, rank: int) -> Tensor:
        return torch.where(_random_words(planes.shape[1], bucket.first, step, rank) < 0, -planes, planes)

    def agreed(self, honest: Sequence[Tensor], bucket: Bucket, t: int) -> Tensor:
        total = honest[0].clone()
        for planes in honest[1:]:
            total += planes
        return total / len(honest)


def attack_on(up: Encoder, method: str) -> Attack:
    """How ballots of this form are attacked.

    Raises:
        ValueError: their signs mean nothing by themselves.
    """
    if isinstance(up, SignBits):
        return OfSigns(up)
    if isinstance(up, TernaryBits):
        return OfTernary(up)
    if isinstance(up, Cast):
        return OfNumbers()
    raise ValueError(
        f"method={method!r} sends more than signs, and what an attacker would send is not defined: choose the faults "
        "absent, late or nan"
    )


def _random_words(count: int, first: int, step: int, rank: int) -> Tensor:
    return mix64(step, torch.arange(first, first + count, device="cpu"), RANDOM_KEYS + rank)


def _without_padding(planes: Tensor, bucket: Bucket) -> Tensor:
    if bucket.tails:
        index, mask = torch.tensor(bucket.tails, device=planes.device).unbind(1)
        planes[:, index] &= mask
    return planes
