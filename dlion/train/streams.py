"""Random numbers as pure functions of what they are for: nothing to save, so resuming and joining need no
stored state.

A counter-based generator: the key is a fold of splitmix64's finaliser over its parts, draw i is the finaliser
of `key + (i+1) * G` (Steele, Lea, Flood 2014). Unlike a library's generators it can never change with a
version.
"""

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

_G = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
# Constant first parts of a key, so that two uses never share numbers.
ORDER, OFFSETS, CROP, FLIP, FRAME, POLICY, SHARE, PARTNER = range(8)


def draws(*key: int, count: int) -> npt.NDArray[np.uint64]:
    """u64[count] that depend on the key alone; negative parts are taken modulo 2^64."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _finalise((state ^ np.uint64(part & _MASK)) + np.uint64(_G))
    return _finalise(state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_G))


def below(bound: int, *key: int, count: int) -> npt.NDArray[np.int64]:
    """i64[count] uniform in 0..bound-1, for bounds up to 2^32 (a bias of bound / 2^32 at most)."""
    return (((draws(*key, count=count) >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


def uniform(*key: int, count: int) -> npt.NDArray[np.float64]:
    """f64[count] uniform in [0, 1), multiples of 2^-53."""
    return (draws(*key, count=count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def beta(both: float, *key: int) -> float:
    """One draw from Beta(both, both), 0 < both <= 1 (Jöhnk 1964): the share of the first of two powers of uniform
    numbers whose sum is at most 1.
    """
    attempt = 0
    while True:
        first, second = uniform(*key, attempt, count=2) ** (1.0 / both)
        if 0.0 < first + second <= 1.0:
            return float(first / (first + second))
        attempt += 1


def order(*key: int, count: int) -> npt.NDArray[np.int64]:
    """i64[count]: a permutation of 0..count-1."""
    return np.argsort(draws(*key, count=count), kind="stable")


def shuffled_positions(seed: int, rank: int, step: int, size: int, total: int) -> npt.NDArray[np.int64]:
    """i64[size]: what a worker that reshuffles 0..total-1 again and again meets at its step.

    The stream of a worker is one permutation after another; step s takes elements `s*size` to `(s+1)*size -
    1` of it. So in every `total` draws in a row that start at a multiple of `total` a worker sees each sample
    once (paper, section 5.1).
    """
    at = np.arange(step * size, (step + 1) * size)
    epochs = at // total
    found = [permutations.of(total, seed, rank, int(epoch))[at[epochs == epoch] % total] for epoch in np.unique(epochs)]
    return np.concatenate(found)


class Permutations:
    """Permutations by key; those used last are kept: a step needs that of its epoch, as every step of it does.

    Args:
        numbers: in all that are kept.
        always: so many are kept however long they are.
    """

    def __init__(self, numbers: int, always: int) -> None:
        self._numbers, self._always = numbers, always
        self._kept: OrderedDict[tuple[int, ...], npt.NDArray[np.int64]] = OrderedDict()
        self.total = 0

    def of(self, total: int, *key: int) -> npt.NDArray[np.int64]:
        """A permutation of 0..total-1, a function of the key."""
        found = self._kept.pop((total, *key), None)
        if found is None:
            found = order(ORDER, *key, count=total)
            self.total += total
        self._kept[(total, *key)] = found
        while self.total > self._numbers and len(self._kept) > self._always:
            self.total -= len(self._kept.popitem(last=False)[1])
        return found

    def clear(self) -> None:
        """Keep none."""
        self._kept.clear()
        self.total = 0


permutations = Permutations(numbers=2**24, always=8)  # 128 MB: simulated workers need one each in every step


def _finalise(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
