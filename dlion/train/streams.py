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
ORDER, OFFSETS, CROP, FLIP = range(4)


def draws(*key: int, count: int) -> npt.NDArray[np.uint64]:
    """u64[count] that depend on the key alone; negative parts are taken modulo 2^64."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _finalise((state ^ np.uint64(part & _MASK)) + np.uint64(_G))
    return _finalise(state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_G))


def below(bound: int, *key: int, count: int) -> npt.NDArray[np.int64]:
    """i64[count] uniform in 0..bound-1, for bounds up to 2^32 (a bias of bound / 2^32 at most)."""
    return (((draws(*key, count=count) >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


def shuffled_positions(seed: int, rank: int, step: int, size: int, total: int) -> npt.NDArray[np.int64]:
    """i64[size]: what a worker that reshuffles 0..total-1 again and again meets at its step.

    The stream of a worker is one permutation after another; step s takes elements `s*size` to `(s+1)*size -
    1` of it. So in every `total` draws in a row that start at a multiple of `total` a worker sees each sample
    once (paper, section 5.1).
    """
    at = np.arange(step * size, (step + 1) * size)
    epochs = at // total
    found = [_permutation(seed, rank, int(epoch), total)[at[epochs == epoch] % total] for epoch in np.unique(epochs)]
    return np.concatenate(found)


_KEPT_NUMBERS = 2**24  # in all permutations kept: 128 MB. Simulated workers need one each in every step.
_KEPT_ALWAYS = 8
_kept: "OrderedDict[tuple[int, ...], npt.NDArray[np.int64]]" = OrderedDict()


def _permutation(*key: int) -> npt.NDArray[np.int64]:
    """The permutation of (seed, rank, epoch, total); a step needs that of its epoch, as every step of it does."""
    if key not in _kept:
        _kept[key] = np.argsort(draws(ORDER, *key[:3], count=key[3]), kind="stable")
        while len(_kept) > _KEPT_ALWAYS and sum(map(len, _kept.values())) > _KEPT_NUMBERS:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key]


def _finalise(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
