"""How many times as long one contender's step takes as another's, round by round: a median and how sure it is."""

import statistics
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

BASE = "dlion"
TAIL = 0.025  # of the chance, on each side


@dataclass(frozen=True)
class Ratio:
    """The ratio of two contenders' steps, taken within each round.

    Attributes:
        median: over the rounds.
        low, high: two of the rounds' ratios, between which the true median lies with a probability of 95 % if rounds
            are independent; of fewer than 6 rounds the lowest and the highest, with less.
    """

    median: float
    low: float
    high: float

    @property
    def inverse(self) -> "Ratio":
        """Of the same contenders the other way round."""
        return Ratio(1 / self.median, 1 / self.high, 1 / self.low)

    @property
    def is_undecided(self) -> bool:
        """Whether the two may be equally quick."""
        return self.low <= 1 <= self.high


def ratio(contender: dict[str, Any], base: dict[str, Any]) -> Ratio:
    """Of two contenders as bench.json holds them: they took their turns in the same rounds."""
    found = sorted(one / other for one, other in zip(contender["turns"], base["turns"], strict=True))
    left_out = _left_out(len(found))
    return Ratio(statistics.median(found), found[left_out], found[-1 - left_out])


def ratios(contenders: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Every contender against dlion; none if dlion was not measured."""
    if BASE not in contenders:
        return {}
    return {name: asdict(ratio(found, contenders[BASE])) for name, found in contenders.items()}


def _left_out(rounds: int) -> int:
    """Extremes to leave out on each side, as in the sign test."""
    count, chance = 0, 1 / 2**rounds
    while chance + comb(rounds, count + 1) / 2**rounds <= TAIL:
        count += 1
        chance += comb(rounds, count) / 2**rounds
    return count
