"""name -> composition: what is said, how it travels, how it is counted."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from dlion.codecs import Cast, CountPlanes, Encoder, SignBits, SumPlanes, TernaryBits
from dlion.rules import Global, Gradient, Lion, Rule
from dlion.tallies import Count, Majority, TernaryMajority, TernaryVotes, Total, Votes


class Decoder(Protocol):
    """Bytes -> numbers."""

    def decode(self, verdict: Tensor, voters: int) -> Any:
        """T[planes, n] and the number of voters -> what the rule's `apply` takes."""


@dataclass(frozen=True)
class Wire:
    """How messages travel: encoding of ballots, counting, decoding of verdicts."""

    up: Encoder
    count: Count
    down: Decoder


@dataclass(frozen=True)
class Choices:
    """The options that a wire depends on. `workers`: size of the voting group."""

    kernels: ModuleType
    workers: int
    ties: str
    zeros: str


@dataclass(frozen=True)
class Method:
    """A named composition.

    Attributes:
        votes: whether ballots are signs, so that `ties`, `zeros` and `topology` have a meaning.
        breaks_ties: whether `ties` has one.
    """

    description: str
    rule: Callable[[ModuleType], Rule]
    wire: Callable[[Choices], Wire]
    votes: bool
    breaks_ties: bool


def majority(c: Choices) -> Wire:
    """One bit each way; two with `zeros="exact"`, and for one worker alone, where no bit travels."""
    if c.zeros == "exact" or c.workers == 1:
        return Wire(TernaryBits(c.kernels), TernaryMajority(c.kernels, c.ties), TernaryBits(c.kernels))
    return Wire(SignBits(c.kernels), Majority(c.kernels, c.ties), SignBits(c.kernels))


def average(c: Choices) -> Wire:
    """One bit up (two with `zeros="exact"` or alone), the count of votes down."""
    if c.zeros == "exact" or c.workers == 1:
        return Wire(TernaryBits(c.kernels), TernaryVotes(c.kernels, c.workers), SumPlanes())
    return Wire(SignBits(c.kernels), Votes(c.kernels, c.workers), CountPlanes())


def mean(c: Choices) -> Wire:
    """Full precision both ways, summed by the backend's all-reduce."""
    return Wire(Cast(), Total(), Cast())


METHODS = {
    "dlion-mavo": Method("Distributed Lion, majority vote: 1 bit per parameter each way", Lion, majority, True, True),
    "dlion-avg": Method("Distributed Lion, average of the votes: 1 bit up, the count down", Lion, average, True, False),
    "g-lion": Method("Lion on the mean gradient, full precision", lambda k: Global(Lion(k)), mean, False, False),
    "g-adamw": Method(
        "AdamW on the mean gradient, full precision",
        lambda k: Gradient(torch.optim.AdamW),
        mean,
        False,
        False,
    ),
}
