"""name -> composition: what is said, how it travels, how it is counted."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from dlion.codecs import Cast, CountPlanes, SignBits, SumPlanes, TernaryBits
from dlion.ops import reference
from dlion.pipeline import FusedLion, Pipeline, Steps, Wire
from dlion.rules import Global, Gradient, Lion, Rule
from dlion.tallies import Majority, TernaryMajority, TernaryVotes, Total, Votes
from dlion.topology import TOPOLOGIES, between_two


@dataclass(frozen=True)
class Choices:
    """The options that a wire depends on. `workers`: size of the voting group."""

    kernels: ModuleType
    workers: int
    ties: str
    zeros: str
    rounding: str

    @property
    def said_zeros(self) -> str:
        """What ballots say of zeros: one worker alone says them exactly, since no bit travels."""
        return "exact" if self.workers == 1 else self.zeros


@dataclass(frozen=True)
class Method:
    """A named composition.

    Attributes:
        options: those of the optimizer that have a meaning here, beside the ones that always do.
        topologies: those that can carry its ballots.
        fused: whether its steps are Lion's, for which there are kernels.
    """

    description: str
    rule: Callable[[ModuleType, str, torch.dtype | None], Rule]
    wire: Callable[[Choices], Wire]
    options: frozenset[str]
    topologies: tuple[str, ...] = TOPOLOGIES
    fused: bool = False

    def steps(self, rule: Rule, choices: Choices) -> Steps:
        """The implementation: Lion's votes run fused where kernels other than the reference do, all else one by one."""
        wire = self.wire(choices)
        if self.fused and choices.kernels is not reference:
            return FusedLion(choices.kernels, wire, choices.said_zeros, choices.rounding)
        return Pipeline(rule, wire)


def majority(c: Choices) -> Wire:
    """One bit each way; two with `zeros="exact"`, and for one worker alone, where no bit travels."""
    if c.said_zeros == "exact":
        return Wire(TernaryBits(c.kernels), TernaryMajority(c.kernels, c.ties), TernaryBits(c.kernels))
    return Wire(SignBits(c.kernels), Majority(c.kernels, c.ties), SignBits(c.kernels))


def average(c: Choices) -> Wire:
    """One bit up (two with `zeros="exact"` or alone), the count of votes down."""
    if c.said_zeros == "exact":
        return Wire(TernaryBits(c.kernels), TernaryVotes(c.kernels, c.workers), SumPlanes())
    return Wire(SignBits(c.kernels), Votes(c.kernels, c.workers), CountPlanes())


def mean(c: Choices) -> Wire:
    """Full precision both ways."""
    return Wire(Cast(), Total(), Cast(), between_two)


PARTS = frozenset({"bucket_bytes", "overlap"})  # where a ballot needs no more than the gradients of its bucket
LION = PARTS | {"rounding", "momentum_dtype"}
VOTES = LION | {"zeros"}

METHODS = {
    "dlion-mavo": Method(
        "Distributed Lion, majority vote: 1 bit each way", Lion, majority, VOTES | {"ties"}, fused=True
    ),
    "dlion-avg": Method(
        "Distributed Lion, average of the votes: 1 bit up, the count down", Lion, average, VOTES, fused=True
    ),
    "g-lion": Method("Lion on the mean gradient", lambda *how: Global(Lion(*how)), mean, LION),
    "g-adamw": Method("AdamW on the mean gradient", lambda *how: Gradient(torch.optim.AdamW), mean, PARTS),
}
