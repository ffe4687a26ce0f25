"""name -> composition: what is said, how it travels, how it is counted."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from dlion.baselines.descent import AheadOfBall, Descent, HeavyBall
from dlion.baselines.ef_sign import EFSign, ScaledSigns
from dlion.baselines.powersgd import Header, PowerSGD
from dlion.baselines.residual import DGC, GradDrop
from dlion.baselines.signs import SignSGD, Signum
from dlion.baselines.sparse import Pairs
from dlion.baselines.terngrad import TernGrad
from dlion.codecs import Cast, CountPlanes, SignBits, SumPlanes, TernaryBits
from dlion.ops import reference
from dlion.pipeline import FusedLion, Pipeline, Steps, Wire
from dlion.rules import Global, Gradient, Lion, Rule
from dlion.tallies import Majority, Relay, TernaryMajority, TernaryVotes, Total, Votes
from dlion.topology import TOPOLOGIES, always, between_two


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
            assert isinstance(rule, Lion)
            return FusedLion(choices.kernels, wire, choices.said_zeros, choices.rounding, rule.betas)
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


def ternary_sum(c: Choices) -> Wire:
    """Two bits up, the sum of -1, 0 and +1 down."""
    return Wire(TernaryBits(c.kernels), TernaryVotes(c.kernels, c.workers), SumPlanes())


def pairs(c: Choices) -> Wire:
    """Indices and values of a few entries, told to everybody."""
    return Wire(Pairs(), Relay(c.workers, ballot_planes=2), Pairs(), always)


def scaled_signs(c: Choices) -> Wire:
    """One bit, and a scale for each tensor, told to everybody."""
    return Wire(ScaledSigns(), Relay(c.workers, ballot_planes=1), ScaledSigns(), always)


def header_alone(c: Choices) -> Wire:
    """Nothing: the survey said it all."""
    return Wire(Header(), Total(), Header(), always)


PARTS = frozenset({"bucket_bytes", "overlap"})  # where a ballot needs no more than the gradients of its bucket
LION = PARTS | {"rounding", "momentum_dtype"}
VOTES = LION | {"zeros"}
NOTHING: frozenset[str] = frozenset()
TOLD = ("auto", "replicated", "server")  # ballots that are told to everybody, not counted shard by shard

METHODS = {
    "dlion-mavo": Method(
        "Distributed Lion, majority vote: 1 bit each way", Lion, majority, VOTES | {"ties"}, fused=True
    ),
    "dlion-avg": Method(
        "Distributed Lion, average of the votes: 1 bit up, the count down", Lion, average, VOTES, fused=True
    ),
    "g-lion": Method("Lion on the mean gradient", lambda *how: Global(Lion(*how)), mean, LION),
    "g-adamw": Method("AdamW on the mean gradient", lambda *how: Gradient(torch.optim.AdamW), mean, PARTS),
    "d-signum-mavo": Method("Sign of the momentum, majority vote", Signum, majority, VOTES | {"ties"}, fused=True),
    "d-signum-avg": Method("Sign of the momentum, average of the votes", Signum, average, VOTES, fused=True),
    "signsgd-mavo": Method(
        "Sign of the gradient, majority vote", SignSGD, majority, (VOTES | {"ties"}) - {"momentum_dtype"}
    ),
    "terngrad": Method(
        "Gradients rounded to three values",
        lambda *how: TernGrad(Gradient(HeavyBall)),
        ternary_sum,
        frozenset({"bucket_bytes"}),
    ),
    "graddrop": Method(
        "The largest entries of the residuals", lambda *how: GradDrop(Gradient(HeavyBall)), pairs, NOTHING, TOLD
    ),
    "dgc": Method("Deep gradient compression", lambda *how: DGC(Gradient(Descent)), pairs, NOTHING, TOLD),
    "ef-signsgd": Method("Scaled signs with error feedback", lambda *how: EFSign(), scaled_signs, NOTHING, TOLD),
    "powersgd": Method(
        "Low-rank factors with error feedback",
        lambda *how: PowerSGD(Gradient(AheadOfBall)),
        header_alone,
        NOTHING,
        ("auto",),
    ),
}
