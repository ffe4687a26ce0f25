"""A tie rule for ablations alone: always +1. It moves parameters that nobody agrees on one way."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dlion.tallies import Count, Majority, TernaryMajority

FIXED = "fixed"


@dataclass(frozen=True)
class FixedMajority:
    """One bit from each voter; a tie is +1."""

    majority: Majority
    ballot_planes = 1
    verdict_planes = 1

    def __call__(self, ballots: Tensor, first_word: int, t: int) -> Tensor:
        if len(ballots) % 2 == 0:
            # one more voter who always says +1 decides the ties and nothing else
            ballots = torch.cat([ballots, torch.full_like(ballots[:1], -1)])
        return self.majority(ballots, first_word, t)


@dataclass(frozen=True)
class FixedTernaryMajority:
    """-1, 0 or +1 from each voter; a tie among those who do not abstain is +1."""

    majority: TernaryMajority
    ballot_planes = 2
    verdict_planes = 2

    def __call__(self, ballots: Tensor, first_word: int, t: int) -> Tensor:
        moved, up = self.majority(ballots, first_word, t)
        somebody = torch.zeros_like(moved)
        for ballot in ballots:
            somebody |= ballot[0]
        return torch.stack([somebody, up | (somebody & ~moved)])


def fixed(count: Count) -> Count:
    """The same counting with ties that are +1."""
    if isinstance(count, Majority):
        return FixedMajority(count)
    assert isinstance(count, TernaryMajority)
    return FixedTernaryMajority(TernaryMajority(count.kernels, "zero"))
