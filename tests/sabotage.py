"""Distributed Lion with one thing wrong, for tests that must fail then."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dlion.codecs import Levels, Moment
from dlion.layout import Bucket
from dlion.pipeline import FusedLion
from dlion.replica import Replica

Sabotage = Callable[[FusedLion], FusedLion]


def honest(steps: FusedLion) -> FusedLion:
    """Nothing is wrong."""
    return steps


@dataclass(frozen=True)
class Changed:
    """Reads a verdict as `inner` does, and then something else."""

    inner: Any

    def decode(self, verdict: Tensor, voters: int) -> Levels:
        return self.change(self.inner.decode(verdict, voters))

    def change(self, levels: Levels) -> Levels:
        raise NotImplementedError


class Summed(Changed):
    """Votes are added up and not divided by the number of voters."""

    def change(self, levels: Levels) -> Levels:
        return replace(levels, denominator=1)


class Inverted(Changed):
    """Every verdict means its opposite."""

    def change(self, levels: Levels) -> Levels:
        return replace(levels, numerators=tuple(-numerator for numerator in levels.numerators))


class Signed(Changed):
    """An average is rounded to -1 or +1."""

    def change(self, levels: Levels) -> Levels:
        return replace(levels, numerators=tuple(1 if n > 0 else -1 for n in levels.numerators), denominator=1)


@dataclass(frozen=True)
class FirstVoter:
    """Counts as `inner` does, but as if everybody had voted as the first."""

    inner: Any

    @property
    def ballot_planes(self) -> int:
        return int(self.inner.ballot_planes)

    @property
    def verdict_planes(self) -> int:
        return int(self.inner.verdict_planes)

    def __call__(self, ballots: Tensor, first_word: int, t: int) -> Tensor:
        verdict: Tensor = self.inner(ballots[:1].expand_as(ballots).contiguous(), first_word, t)
        return verdict


class Undecayed(FusedLion):
    """Parameters do not decay."""

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, voters: int, moment: Moment) -> None:
        with_decay = replica.hypers
        replica.hypers = [hyper | {"weight_decay": 0.0} for hyper in with_decay]
        super().apply(replica, bucket, verdict, voters, moment)
        replica.hypers = with_decay


class DecayedTwice(FusedLion):
    """Parameters decay by twice as much."""

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, voters: int, moment: Moment) -> None:
        before = replica.hypers
        replica.hypers = [hyper | {"weight_decay": 2 * hyper["weight_decay"]} for hyper in before]
        super().apply(replica, bucket, verdict, voters, moment)
        replica.hypers = before


class DecayedLate(Undecayed):
    """Parameters decay after the step and not before it."""

    def apply(self, replica: Replica, bucket: Bucket, verdict: Tensor, voters: int, moment: Moment) -> None:
        super().apply(replica, bucket, verdict, voters, moment)
        hyper = replica.hypers[0]
        replica.params[0].detach().mul_(1 - hyper["lr"] * hyper["weight_decay"])


class DecayedInGradient(Undecayed):
    """Decay is part of the gradient, and so of the vote: what PyTorch's SGD calls weight decay."""

    def ballot(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, bool]:
        param = replica.params[0]
        assert param.grad is not None
        param.grad = param.grad + replica.hypers[0]["weight_decay"] * param.detach()
        return super().ballot(replica, bucket, moment)


class Deaf(FusedLion):
    """Nobody looks at gradients."""

    def ballot(self, replica: Replica, bucket: Bucket, moment: Moment) -> tuple[Tensor, bool]:
        param = replica.params[0]
        assert param.grad is not None
        param.grad = torch.zeros_like(param.grad)
        return super().ballot(replica, bucket, moment)


def reading(how: type[Changed], steps: FusedLion) -> FusedLion:
    """The same steps, with verdicts read otherwise."""
    return replace(steps, wire=replace(steps.wire, down=how(steps.wire.down)))


def counting(how: type[FirstVoter], steps: FusedLion) -> FusedLion:
    """The same steps, with ballots counted otherwise."""
    return replace(steps, wire=replace(steps.wire, count=how(steps.wire.count)))


def being(how: type[FusedLion], steps: FusedLion) -> FusedLion:
    """The same steps, with another ballot or apply."""
    return how(steps.kernels, steps.wire, steps.zeros, steps.rounding)
