"""The Triton kernels that make ballots and apply verdicts: a program for each chunk of a piece.

Triton alone is used, and nothing of one vendor. Products and sums are rounded one by one: fusing them is off at launch
(`LAUNCH`), and numbers of 16 bits are rounded by integer arithmetic or by one conversion to nearest. A chunk that is
whole and starts at a multiple of 16 bytes is read and written 16 bytes at a time, any other element by element.

What changes from step to step (t, betas, steps, decays) is read from device memory and never compiled in: kernels are
compiled once for each pair of dtypes, way to say zero, way to round and number of planes.
"""

import torch
import triton
import triton.language as tl

from dlion.ops.bits import GOLDEN, MULTIPLIERS
from dlion.ops.reference import MOMENTUM_KEYS, SMALLEST_MOMENTUM

CHUNK = 2048  # elements of a program: 16 for each of its 128 threads, so that enough loads are on their way at once
LAUNCH = {"ROWS": CHUNK // 32, "num_warps": 4, "enable_fp_fusion": False}
if torch.version.hip is None:
    LAUNCH["maxnreg"] = 128  # of a thread; without a limit ptxas aims for fewer, and some kernels spill

_GOLDEN, _FIRST, _SECOND = (tl.constexpr(number) for number in (GOLDEN, *MULTIPLIERS))
_MOMENTUM_KEYS = tl.constexpr(MOMENTUM_KEYS)
_SMALLEST = tl.constexpr(SMALLEST_MOMENTUM)
_INFINITE = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_HALF_NORMAL = tl.constexpr(113 << 23)  # 2**-14, the smallest normal number of float16, as a float32
_HALF_REBIAS = tl.constexpr(112 << 23)  # between the exponents of float32 and float16
_HALF_TOO_LARGE = tl.constexpr(143 << 23)  # 2**16
_HALF_STEPS = tl.constexpr(2.0**40)  # steps of 2**-24 with 16 bits of fraction


@triton.jit
def finalise(x):
    """The splitmix64 finaliser of unsigned numbers; see `mix64` in bits.py."""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def is_finite(x):
    return (x.to(tl.int32, bitcast=True) & _MAGNITUDE) < _INFINITE


@triton.jit
def flipped(t):
    """All bits where t is odd: what complements a hash."""
    return (0 - (t & 1)).to(tl.uint64)


@triton.jit
def random_bits(t, key, first_quad, at):
    """16 bits for each element, as `round_stochastic` draws them; its quads begin at `first_quad`."""
    start = finalise((finalise((t >> 1).to(tl.uint64) + _GOLDEN) ^ key.to(tl.uint64)) + _GOLDEN)
    quad = (first_quad + at // 4).to(tl.uint64)
    drawn = finalise((quad ^ start) + _GOLDEN) ^ flipped(t)
    return (drawn >> (at % 4 * 16).to(tl.uint64)).to(tl.uint32) & 0xFFFF


@triton.jit
def zero_bits(t, rank, first_word, row):
    """For each half-word the half of its word's hash that ballots take where they are zero."""
    word = (first_word + row // 2).to(tl.uint64)
    hashed = finalise((finalise((t >> 1).to(tl.uint64) + _GOLDEN) ^ word) + _GOLDEN)
    noise = finalise((hashed ^ rank.to(tl.uint64)) + _GOLDEN) ^ flipped(t)
    return (noise >> (row % 2 * 32).to(tl.uint64)).to(tl.int32)


@triton.jit
def places(ROWS: tl.constexpr):
    """Where in a chunk each element lies: i32[ROWS, 32], a row for each half of a word."""
    return tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def memory(address, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to element `start` of the tensor at `address`; bf16 is read and written as the 16 bits that it is."""
    first = address.to(tl.pointer_type(tl.int16 if DTYPE == tl.bfloat16 else DTYPE)) + start
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first


@triton.jit
def widened(x, DTYPE: tl.constexpr):
    """What was read -> f32."""
    if DTYPE == tl.bfloat16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def nearest(x, DTYPE: tl.constexpr):
    """f32 -> what is written, ties to even."""
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where((bits & _MAGNITUDE) > _INFINITE, 0x7FC0, rounded).to(tl.int16)
    else:
        return x.to(DTYPE)


@triton.jit
def ballot_chunk(
    grads, momenta, start, left, betas, t, words, finite, plane_words, first_word, rank,
    GRAD: tl.constexpr, MOMENTUM: tl.constexpr, TERNARY: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    at = places(ROWS)
    length = ROWS * 32 if WHOLE else left
    real = at < length
    heard = at < tl.where(grads != 0, length, 0)
    grad = memory(grads, start, GRAD, WHOLE)
    momentum = memory(momenta, start, MOMENTUM, WHOLE)
    g = widened(tl.load(grad + at, mask=heard, other=0), GRAD)
    before = tl.load(momentum + at, mask=real, other=0)
    m = widened(before, MOMENTUM)
    message = m * tl.load(betas) + g * tl.load(betas + 1)
    moved = m * tl.load(betas + 2) + g * tl.load(betas + 3)
    moved = tl.where(tl.abs(moved) < _SMALLEST, 0.0, moved)
    voted = is_finite(message)
    if MOMENTUM == tl.bfloat16:
        random = random_bits(t, rank.to(tl.int64) + _MOMENTUM_KEYS, (first_word + start // 64) * 16, at)
        bits = moved.to(tl.uint32, bitcast=True)
        fine = voted & ((bits & _MAGNITUDE) + random < _INFINITE)  # rounding up may reach infinity
        tl.store(momentum + at, tl.where(fine, (bits + random) >> 16, before).to(tl.int16), mask=real)
    else:
        tl.store(momentum + at, tl.where(voted, moved, before), mask=real)
    tl.store(finite + tl.zeros_like(at), 0, mask=real & ~voted)

    positive = voted & (message > 0) & real
    zero = ~voted | (message == 0)
    second = (~zero if TERNARY else zero) & real
    bit = tl.full([1, 32], 1, tl.int32) << tl.arange(0, 32)[None, :]
    first_bits = tl.sum(tl.where(positive, bit, 0), 1)  # none meets another: a sum joins them
    second_bits = tl.sum(tl.where(second, bit, 0), 1)
    row = tl.arange(0, ROWS)
    halves = words.to(tl.pointer_type(tl.int32)) + start // 32 + row
    written = row < (ROWS if WHOLE else (left + 63) // 64 * 2)
    if TERNARY:
        tl.store(halves, second_bits, mask=written)
        tl.store(halves + plane_words * 2, first_bits, mask=written)
    else:
        noise = zero_bits(t, rank, first_word + start // 64, row)
        tl.store(halves, first_bits | (second_bits & noise), mask=written)


@triton.jit(do_not_specialize=list(range(10)))
def ballot(
    owners, pieces, addresses, betas, clock, words, finite,
    plane_words: tl.int64, first_word: tl.int64, rank: tl.int64,
    GRAD: tl.constexpr, MOMENTUM: tl.constexpr, TERNARY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient and momentum -> moved momentum and ballot.

    Args:
        owners, pieces, addresses: of `chunks.Chunks`; the addresses of gradient (0: none) and momentum of each piece.
        betas: f32[groups, 4], the factors of momentum and gradient in the message, and of both in the moved momentum.
        clock: i64[1], t. words: i64[planes, plane_words]. finite: bool[1], set to 0 where something is not finite.
        first_word, rank: as in `reference.ballot`.
        GRAD: dtype of gradients. MOMENTUM: of momenta, float32 or bfloat16. TERNARY: two planes.
        ROWS: half-words of a chunk.
    """
    piece = tl.load(owners + tl.program_id(0))
    row = pieces + piece * 4
    start = (tl.program_id(0) - tl.load(row + 3)) * (ROWS * 32)
    left = tl.minimum(tl.load(row) - start, ROWS * 32).to(tl.int32)
    piece_word = tl.load(row + 1)
    grads, momenta = tl.load(addresses + piece * 2), tl.load(addresses + piece * 2 + 1)
    betas += tl.load(row + 2) * 4
    words += piece_word
    first_word += piece_word
    t = tl.load(clock)
    if (left == ROWS * 32) & ((grads | momenta) % 16 == 0):
        ballot_chunk(
            grads, momenta, start, left, betas, t, words, finite, plane_words, first_word, rank,
            GRAD, MOMENTUM, TERNARY, ROWS, True,
        )  # fmt: skip
    else:
        ballot_chunk(
            grads, momenta, start, left, betas, t, words, finite, plane_words, first_word, rank,
            GRAD, MOMENTUM, TERNARY, ROWS, False,
        )  # fmt: skip


@triton.jit
def rounded_up_or_down(x, random, DTYPE: tl.constexpr):
    """f32 -> what is written of bf16 or fp16, as `round_stochastic` rounds."""
    bits = x.to(tl.uint32, bitcast=True)
    if DTYPE == tl.bfloat16:
        return ((bits + tl.where(is_finite(x), random, 0)) >> 16).to(tl.int16)
    else:
        magnitude = bits & _MAGNITUDE
        tiny = magnitude < _HALF_NORMAL
        fraction = (tl.where(tiny, tl.abs(x), 0.0) * _HALF_STEPS).to(tl.uint32)
        drawn = tl.where(tiny, (fraction + random) >> 16, (magnitude + (random >> 3) - _HALF_REBIAS) >> 13)
        drawn = (drawn | ((bits >> 16) & 0x8000)).to(tl.uint16).to(tl.float16, bitcast=True)
        return tl.where(magnitude < _HALF_TOO_LARGE, drawn, nearest(x, DTYPE))


@triton.jit
def apply_chunk(
    params, start, left, planes, plane_words, table, t, first_word, key,
    PARAM: tl.constexpr, PLANES: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    at = places(ROWS)
    real = at < (ROWS * 32 if WHOLE else left)
    param = memory(params, start, PARAM, WHOLE)
    p = widened(tl.load(param + at, mask=real, other=0), PARAM)
    row = tl.arange(0, ROWS)
    written = row < (ROWS if WHOLE else (left + 63) // 64 * 2)
    halves = planes.to(tl.pointer_type(tl.int32)) + start // 32 + row
    level = tl.zeros_like(at)
    for plane in tl.static_range(PLANES):
        half = tl.load(halves + plane * plane_words * 2, mask=written, other=0)
        level |= ((half[:, None] >> tl.arange(0, 32)[None, :]) & 1) << plane
    if PLANES == 1:
        step = tl.where(level == 0, tl.load(table), tl.load(table + 1))
    else:
        step = tl.load(table + level)
    moved = p * tl.load(table + 2**PLANES) - step
    if STOCHASTIC:
        random = random_bits(t, key, (first_word + start // 64) * 16, at)
        tl.store(param + at, rounded_up_or_down(moved, random, PARAM), mask=real)
    else:
        tl.store(param + at, nearest(moved, PARAM), mask=real)


@triton.jit(do_not_specialize=list(range(9)))
def apply(
    owners, pieces, addresses, tables, clock, planes,
    plane_words: tl.int64, first_word: tl.int64, key: tl.int64,
    PARAM: tl.constexpr, PLANES: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Verdict and parameter -> parameter, decayed and moved: `p = p*decay - table[level]`.

    Args:
        owners, pieces, addresses: of `chunks.Chunks`; the address of each parameter.
        tables: f32[groups, 2**PLANES + 1], a step for each level, and the decay.
        clock: i64[1], t. planes: i64[PLANES, ...], a row every `plane_words`.
        first_word: as in `reference.apply`. key: of the rounding.
        PARAM: dtype of parameters. STOCHASTIC: how bf16 and fp16 are rounded, else to nearest.
        ROWS: half-words of a chunk.
    """
    piece = tl.load(owners + tl.program_id(0))
    row = pieces + piece * 4
    start = (tl.program_id(0) - tl.load(row + 3)) * (ROWS * 32)
    left = tl.minimum(tl.load(row) - start, ROWS * 32).to(tl.int32)
    piece_word = tl.load(row + 1)
    params = tl.load(addresses + piece)
    tables += tl.load(row + 2) * (2**PLANES + 1)
    planes += piece_word
    first_word += piece_word
    t = tl.load(clock)
    if (left == ROWS * 32) & (params % 16 == 0):
        apply_chunk(
            params, start, left, planes, plane_words, tables, t, first_word, key,
            PARAM, PLANES, STOCHASTIC, ROWS, True,
        )  # fmt: skip
    else:
        apply_chunk(
            params, start, left, planes, plane_words, tables, t, first_word, key,
            PARAM, PLANES, STOCHASTIC, ROWS, False,
        )  # fmt: skip
