"""The compiled CPU kernels (`csrc/`) behind the schemas of `dlion.ops`; called through ctypes.

Every function has the arguments and gives the bits of its namesake in `reference.py`. What the library does not know
(float64, momenta of other dtypes) goes to the reference, piece by piece.
"""

import ctypes
from array import array
from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dlion.ops import library, reference
from dlion.ops.arguments import (
    NO_HYPER_PARAMETERS,
    ballot_planes,
    check_lengths,
    check_pieces,
    check_rounding,
    check_tables,
    check_voters,
)
from dlion.ops.bits import as_bytes
from dlion.ops.memory import present, put_back, those, with_rows

OPERATORS = (
    "tally_majority",
    "tally_majority_ternary",
    "tally_count",
    "tally_count_ternary",
    "ballot",
    "apply",
    "hashed",
)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOMENTA = {torch.float32: 0, torch.bfloat16: 1}
UNKNOWN = -1
TIES = {"rotate": 0, "alternate": 1, "zero": 2}
FINE, BAD_PIECE, NO_MEMORY = 0, -1, -2  # what the C functions return; 1 is "not finite"

_long = ctypes.c_int64
_dtype = attrgetter("dtype")


def ballot(
    grads: list[Tensor | None],
    momenta: list[Tensor],
    offsets: list[int],
    groups: list[int],
    size: int,
    beta1s: list[float],
    beta2s: list[float],
    negate: list[bool],
    first_word: int,
    t: int,
    rank: int,
    zeros: str,
) -> tuple[Tensor, Tensor]:
    narrow = _numbers(momenta, MOMENTA)
    if UNKNOWN in narrow:
        known = [kind != UNKNOWN for kind in narrow]
        rest: Any = (size, beta1s, beta2s, negate, first_word, t, rank, zeros)
        words, finite = ballot(*those(known, True, grads, momenta, offsets, groups), *rest)
        others, fine = reference.ballot(*those(known, False, grads, momenta, offsets, groups), *rest)
        return words | others, finite & fine
    planes = ballot_planes(zeros)
    numels = list(map(Tensor.numel, momenta))
    _kept, addresses, dtypes = _read(grads, numels)  # copies live until the call is over
    moved = list(map(Tensor.contiguous, momenta))
    words = torch.empty(planes, size // 64, dtype=torch.int64, device="cpu")  # all of it is written below
    betas: list[float] = []
    for beta1, beta2, maximize in zip(beta1s, beta2s, negate, strict=True):
        sign = -1.0 if maximize else 1.0  # to negate the scalar gives the bits of a negated gradient
        betas += (beta1, sign * (1 - beta1), beta2, sign * (1 - beta2))
    result = library.loaded().dlion_ballot(
        _longs(addresses),
        _longs(map(Tensor.data_ptr, moved)),
        *_placed(numels, offsets, dtypes, groups),
        _longs(narrow),
        _floats(betas),
        len(negate),
        words.data_ptr(),
        planes,
        size // 64,
        first_word,
        t,
        rank,
        torch.get_num_threads(),
    )
    _check(result, offsets, numels, size)
    put_back(momenta, moved)
    return words, torch.tensor(result == FINE, device="cpu")


def apply(
    params: list[Tensor],
    planes: Tensor,
    offsets: list[int],
    groups: list[int],
    tables: list[float],
    decays: list[float],
    rounding: str,
    first_word: int,
    t: int,
    seed: int,
) -> None:
    dtypes = _numbers(params, DTYPES)
    if UNKNOWN in dtypes:
        known = [dtype != UNKNOWN for dtype in dtypes]
        rest: Any = (tables, decays, rounding, first_word, t, seed)
        for native, run in ((True, apply), (False, reference.apply)):
            mine, starts, theirs = those(known, native, params, offsets, groups)
            run(mine, planes, starts, theirs, *rest)
        return
    check_tables(tables, decays, len(planes))
    check_rounding(rounding)
    planes = with_rows(planes)
    numels = list(map(Tensor.numel, params))
    moved = list(map(Tensor.contiguous, params))
    result = library.loaded().dlion_apply(
        _longs(map(Tensor.data_ptr, moved)),
        *_placed(numels, offsets, dtypes, groups),
        planes.data_ptr(),
        len(planes),
        planes.stride(0),
        planes.shape[1],
        _floats(tables),
        _floats(decays),
        len(decays),
        rounding == "stochastic",
        first_word,
        t,
        seed,
        torch.get_num_threads(),
    )
    _check(result, offsets, numels, planes.shape[1] * 64)
    put_back(params, moved)


def tally_majority(ballots: Tensor, first_word: int, t: int, ties: str) -> Tensor:
    return _tally(ballots[:, None], 1, 0, ties, first_word, t)[0]


def tally_majority_ternary(ballots: Tensor, first_word: int, t: int, ties: str) -> Tensor:
    return _tally(ballots, 2, 0, ties, first_word, t)


def tally_count(ballots: Tensor, planes: int) -> Tensor:
    return _tally(ballots[:, None], planes, planes, "rotate", 0, 0)


def tally_count_ternary(ballots: Tensor, planes: int) -> Tensor:
    return _tally(ballots, planes, planes, "rotate", 0, 0)


def hashed(tensor: Tensor, number: int) -> Tensor:
    flat = as_bytes(tensor)
    total = library.loaded().dlion_hash(flat.data_ptr(), flat.numel(), number, torch.get_num_threads())
    return torch.tensor(total, dtype=torch.int64, device="cpu")


def _tally(ballots: Tensor, planes: int, counted: int, ties: str, first_word: int, t: int) -> Tensor:
    """i64[voters, 1 or 2, words] -> i64[planes, words]."""
    voters, ballot_planes, words = ballots.shape
    check_voters(voters)
    ballots = with_rows(ballots)
    verdict = torch.empty(planes, words, dtype=torch.int64, device="cpu")
    library.loaded().dlion_tally(
        ballots.data_ptr(),
        ballots.stride(0),
        ballots.stride(1),
        voters,
        words,
        ballot_planes == 2,
        counted,
        TIES[ties],
        verdict.data_ptr(),
        first_word,
        t,
        torch.get_num_threads(),
    )
    return verdict


def _numbers(tensors: list[Tensor], known: dict[torch.dtype, int]) -> list[int]:
    """The library's number of each tensor's dtype, UNKNOWN where it has none."""
    return list(map(known.get, map(_dtype, tensors), repeat(UNKNOWN)))


def _longs(values: Iterable[int]) -> ctypes.Array[ctypes.c_int64]:
    numbers = array("q", values)
    return (_long * len(numbers)).from_buffer(numbers)


def _floats(values: Iterable[float]) -> ctypes.Array[ctypes.c_float]:
    """Each rounded once, to nearest."""
    numbers = array("f", values)
    return (ctypes.c_float * len(numbers)).from_buffer(numbers)


def _placed(numels: list[int], offsets: list[int], dtypes: list[int], groups: list[int]) -> tuple[Any, ...]:
    """Where the pieces lie in the bucket, as the C functions take it: four arrays and their length."""
    check_lengths(numels, offsets, groups)
    return *map(_longs, (numels, offsets, dtypes, groups)), len(numels)


def _read(grads: list[Tensor | None], numels: list[int]) -> tuple[list[Tensor], list[int], list[int]]:
    """The gradients as the kernels read them, and an address and a dtype for every piece; 0 where there is none.

    One that is not contiguous or has another dtype is read from a copy, which lives as long as the first list.
    """
    found, there = present(grads, numels)
    dtypes = _numbers(found, DTYPES)
    if UNKNOWN in dtypes:
        found = [grad.float() if dtype == UNKNOWN else grad for grad, dtype in zip(found, dtypes, strict=True)]
        dtypes = _numbers(found, DTYPES)
    read = list(map(Tensor.contiguous, found))
    addresses = list(map(Tensor.data_ptr, read))
    if there:
        placed, kinds = iter(addresses), iter(dtypes)
        addresses = [next(placed) if is_there else 0 for is_there in there]
        dtypes = [next(kinds) if is_there else 0 for is_there in there]
    return read, addresses, dtypes


def _check(result: int, offsets: list[int], numels: list[int], size: int) -> None:
    if result == NO_MEMORY:
        raise MemoryError("the native kernels had no memory for their list of pieces")
    if result == BAD_PIECE:
        check_pieces(offsets, numels, size)
        raise ValueError(NO_HYPER_PARAMETERS)
