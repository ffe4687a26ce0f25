"""The Triton kernels that make ballots and apply verdicts: a program for each chunk of a piece, part after part.

Triton alone is used, and nothing of one vendor. Products and sums are rounded one by one: fusing them is off at launch
(`LAUNCH`), and numbers of 16 bits are rounded by integer arithmetic or by one conversion to nearest. A part that is
whole and starts at a multiple of 16 bytes is read and written 16 bytes at a time, any other element by element.

A GPU that moves memory at its full rate has time for few instructions an element (docs/gpu.md), so what is the same for
many elements is computed once: for a chunk before its first part, for a quad of elements, for a quarter of a word.

What changes from step to step (t, betas, steps, decays) is read from device memory and never compiled in: kernels are
compiled once for each pair of dtypes, way to say zero, way to round and number of planes.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from dlion.ops.reference import MOMENTUM_KEYS, SMALLEST_MOMENTUM
from dlion.ops.triton_mix import hash_of, mixed, random_bits, zero_bits

PART = 2048  # elements at once: 16 for each of a program's 128 threads, so that enough loads are on their way
CHUNK = 4 * PART  # elements of a program: what it computes once is shared by four parts
LAUNCH = {"CHUNK": CHUNK, "PART": PART, "num_warps": 4, "enable_fp_fusion": False}
# of a thread: with fewer, kernels spill for compute capability 9.0; with more, fewer programs have loads on their way
REGISTERS = {"ballot": 128, "apply": 80}

_MOMENTUM_KEYS = tl.constexpr(MOMENTUM_KEYS)
_SMALLEST = tl.constexpr(SMALLEST_MOMENTUM)
_NAN = tl.constexpr(0x7FC00000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_HALF_NORMAL = tl.constexpr(113 << 23)  # 2**-14, the smallest normal number of float16, as a float32
_HALF_REBIAS = tl.constexpr(112 << 23)  # between the exponents of float32 and float16
_HALF_TOO_LARGE = tl.constexpr(143 << 23)  # 2**16
_HALF_STEPS = tl.constexpr(2.0**40)  # steps of 2**-24 with 16 bits of fraction


@triton.jit
def memory(address, DTYPE: tl.constexpr):
    """Pointer to the tensor at `address`; bf16 is read and written as the 16 bits that it is."""
    return address.to(tl.pointer_type(tl.int16 if DTYPE == tl.bfloat16 else DTYPE))


@triton.jit
def from_done(first, done, WHOLE: tl.constexpr):
    """Pointer to the part after `done` elements; of a whole one the compiler learns how it is aligned."""
    return tl.multiple_of(first + done, 16) if WHOLE else first + done


@triton.jit
def read(first, count, DTYPE: tl.constexpr, PART: tl.constexpr):
    """The first `count` elements of a part -> f32[PART], 0 beyond."""
    at = tl.arange(0, PART)
    x = tl.load(first + at, mask=at < count, other=0)
    if DTYPE == tl.bfloat16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def write(first, count, x, DTYPE: tl.constexpr, PART: tl.constexpr):
    """x[PART] to the first `count` elements of a part; for bf16 the upper halves of 32 bits."""
    at = tl.arange(0, PART)
    if DTYPE == tl.bfloat16:
        x = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.int16)
    tl.store(first + at, x, mask=at < count)


@triton.jit
def nearest(x, DTYPE: tl.constexpr):
    """f32 -> what `write` takes, ties to even."""
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), _NAN)
    else:
        return x.to(DTYPE)


@triton.jit
def said(message, count, PART: tl.constexpr):
    """Of each quarter of a word three times 16 bits, i32[PART / 16]: positive, zero and not finite; 0 beyond `count`.

    What is not finite is in both of the first two.
    """
    nought = message * 0.0  # NaN where the message is not finite, and no number is more or less than that
    place = tl.arange(0, 16)[None, :]
    beyond = (tl.arange(0, PART) >= count).reshape(PART // 16, 16)
    no_more = (message <= nought).reshape(PART // 16, 16) | beyond
    not_zero = (tl.abs(message) > nought).reshape(PART // 16, 16) | beyond
    # both in one number, for each sum over threads costs as much as a few elements
    both = tl.sum(tl.where(no_more, 0, 1 << place) | tl.where(not_zero, 0, 0x10000 << place), 1)
    # a sum lies in all threads that it is made of: after this each is in one, and what follows is done once
    both = tl.gather(both, tl.arange(0, PART // 16), 0)
    zero = (both >> 16) & 0xFFFF
    return both & ~zero & 0xFFFF, zero, both & zero


@triton.jit
def ballot_part(
    grads, momenta, quarters, finite, done, left, there, moves, of_m, of_g, kept_m, kept_g, timed, keyed, flip, rank,
    first_word, plane_quarters,
    GRAD: tl.constexpr, MOMENTUM: tl.constexpr, TERNARY: tl.constexpr, PART: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    count = PART if WHOLE else left - done
    first_word += done // 64
    momentum = from_done(momenta, done, WHOLE)
    g = read(from_done(grads, done, WHOLE), tl.where(there, count, 0), GRAD, PART)
    m = read(momentum, count, MOMENTUM, PART)
    message = m * of_m + g * of_g
    moved = m * kept_m + g * kept_g
    moved = tl.where(tl.abs(moved) < _SMALLEST, 0.0, moved)
    odd = message * 0.0  # 0 or NaN: a product costs half of a comparison, and a sum of two tells of both
    if MOMENTUM == tl.bfloat16:
        random = random_bits(keyed, flip, first_word, PART)
        moved = (moved.to(tl.uint32, bitcast=True) + random).to(tl.float32, bitcast=True)
        # rounding up may reach infinity; it may turn NaN into a number, but where a message is finite none is NaN
        odd += moved * 0.0
    write(momentum, tl.where(moves, count, 0), tl.where(odd == 0, moved, m), MOMENTUM, PART)

    positive, zero, not_finite = said(message, count, PART)
    quarter = tl.arange(0, PART // 16)
    tl.store(finite + tl.zeros_like(quarter), 0, mask=not_finite != 0)
    written = quarter < (PART // 16 if WHOLE else (count + 63) // 64 * 4)
    places = quarters + done // 16 + quarter
    if TERNARY:
        inside = 0xFFFF if WHOLE else (1 << tl.minimum(tl.maximum(count - quarter * 16, 0), 16)) - 1
        tl.store(places, (~zero & inside).to(tl.int16), mask=written)
        tl.store(places + plane_quarters, positive.to(tl.int16), mask=written)
    else:
        if tl.max(zero, 0) != 0:  # mostly none is, and the hash costs as much as three instructions for each element
            positive |= zero & zero_bits(timed, flip, rank, first_word, PART)
        tl.store(places, positive.to(tl.int16), mask=written)


@triton.jit(do_not_specialize=list(range(11)))
def ballot(
    owners, pieces, addresses, betas, clock, words, finite,
    plane_words: tl.int64, first_word: tl.int64, rank: tl.int64, awake,
    GRAD: tl.constexpr, MOMENTUM: tl.constexpr, TERNARY: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Gradient and momentum -> moved momentum and ballot.

    Args:
        owners, pieces, addresses: of `chunks.Chunks`; the addresses of gradient (0: none) and momentum of each piece.
        betas: f32[groups, 4], the factors of momentum and gradient in the message, and of both in the moved momentum.
        clock: i64[1], t. words: i64[planes, plane_words]. finite: bool[1], set to 0 where something is not finite.
        first_word, rank: as in `reference.ballot`.
        awake: bool[1], 0 where no momentum may move.
        GRAD: dtype of gradients. MOMENTUM: of momenta, float32 or bfloat16. TERNARY: two planes.
        CHUNK: elements of a program. PART: of them at once.
    """
    piece = tl.load(owners + tl.program_id(0))
    row = pieces + piece * 4
    start = (tl.program_id(0) - tl.load(row + 3)) * CHUNK
    left = tl.minimum(tl.load(row) - start, CHUNK).to(tl.int32)
    piece_word = tl.load(row + 1)
    grads, momenta = tl.load(addresses + piece * 2), tl.load(addresses + piece * 2 + 1)
    betas += tl.load(row + 2) * 4
    of_m, of_g, kept_m, kept_g = tl.load(betas), tl.load(betas + 1), tl.load(betas + 2), tl.load(betas + 3)
    timed, flip = hash_of(tl.load(clock))
    keyed = mixed(timed, rank.to(tl.int64) + _MOMENTUM_KEYS)
    there, moves = grads != 0, tl.load(awake)
    whole = tl.where((grads | momenta) % 16 == 0, left // PART * PART, 0)
    grads, momenta = memory(grads, GRAD) + start, memory(momenta, MOMENTUM) + start
    quarters = (words + piece_word).to(tl.pointer_type(tl.int16)) + start // 16
    first_word += piece_word + start // 64
    for done in range(0, whole, PART):
        ballot_part(
            grads, momenta, quarters, finite, done, left, there, moves, of_m, of_g, kept_m, kept_g, timed, keyed, flip,
            rank, first_word, plane_words * 4, GRAD, MOMENTUM, TERNARY, PART, True,
        )  # fmt: skip
    for done in range(whole, left, PART):
        ballot_part(
            grads, momenta, quarters, finite, done, left, there, moves, of_m, of_g, kept_m, kept_g, timed, keyed, flip,
            rank, first_word, plane_words * 4, GRAD, MOMENTUM, TERNARY, PART, False,
        )  # fmt: skip


@triton.jit
def rounded_up_or_down(x, random, DTYPE: tl.constexpr):
    """f32 -> what `write` takes for bf16 or fp16, as `round_stochastic` rounds."""
    bits = x.to(tl.uint32, bitcast=True)
    if DTYPE == tl.bfloat16:
        return bits + tl.where(tl.abs(x) < float("inf"), random, 0)
    else:
        magnitude = bits & _MAGNITUDE
        tiny = magnitude < _HALF_NORMAL
        fraction = (tl.where(tiny, tl.abs(x), 0.0) * _HALF_STEPS).to(tl.uint32)
        drawn = tl.where(tiny, (fraction + random) >> 16, (magnitude + (random >> 3) - _HALF_REBIAS) >> 13)
        drawn = (drawn | ((bits >> 16) & 0x8000)).to(tl.uint16).to(tl.float16, bitcast=True)
        return tl.where(magnitude < _HALF_TOO_LARGE, drawn, x.to(DTYPE))


@triton.jit
def level_of(halves, plane_halves, written, PLANES: tl.constexpr, PART: tl.constexpr):
    """The number that the planes say of each element, i32[PART]; plane 0 is its lowest bit.

    Four elements share the arithmetic: a product spreads their bits of a plane over the four bytes of a number.
    """
    level = tl.zeros([PART], tl.uint32)
    for lowest in tl.static_range(0, PLANES, 8):
        four = tl.zeros([PART // 32, 8], tl.uint32)
        for plane in tl.static_range(lowest, min(PLANES, lowest + 8)):
            half = tl.load(halves + plane * plane_halves, mask=written, other=0).to(tl.uint32)
            bits = (half[:, None] >> (4 * tl.arange(0, 8))[None, :].to(tl.uint32)) & 15
            four |= (bits * (0x00204081 << (plane - lowest))) & (0x01010101 << (plane - lowest))
        two = tl.join(four, four >> 16)
        level |= tl.join(two & 255, (two >> 8) & 255).reshape(PART) << lowest
    return level.to(tl.int32)


@triton.jit
def apply_part(
    params, halves, plane_halves, done, left, table, decay, keyed, flip, first_word,
    PARAM: tl.constexpr, PLANES: tl.constexpr, STOCHASTIC: tl.constexpr, PART: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    count = PART if WHOLE else left - done
    param = from_done(params, done, WHOLE)
    p = read(param, count, PARAM, PART)
    row = tl.arange(0, PART // 32)
    written = row < (PART // 32 if WHOLE else (count + 63) // 64 * 2)
    halves += done // 32 + row
    if PLANES == 1:
        places = tl.arange(0, 32)[None, :]
        bit = (tl.load(halves, mask=written, other=0)[:, None] >> places) & 1
        step = tl.where(bit.reshape(PART) == 0, tl.load(table), tl.load(table + 1))
    else:
        step = tl.load(table + level_of(halves, plane_halves, written, PLANES, PART))
    moved = p * decay - step
    if STOCHASTIC:
        moved = rounded_up_or_down(moved, random_bits(keyed, flip, first_word + done // 64, PART), PARAM)
    else:
        moved = nearest(moved, PARAM)
    write(param, count, moved, PARAM, PART)


@triton.jit(do_not_specialize=list(range(9)))
def apply(
    owners, pieces, addresses, tables, clock, planes,
    plane_words: tl.int64, first_word: tl.int64, key: tl.int64,
    PARAM: tl.constexpr, PLANES: tl.constexpr, STOCHASTIC: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Verdict and parameter -> parameter, decayed and moved: `p = p*decay - table[level]`.

    Args:
        owners, pieces, addresses: of `chunks.Chunks`; the address of each parameter.
        tables: f32[groups, 2**PLANES + 1], a step for each level, and the decay.
        clock: i64[1], t. planes: i64[PLANES, ...], a row every `plane_words`.
        first_word: as in `reference.apply`. key: of the rounding.
        PARAM: dtype of parameters. STOCHASTIC: how bf16 and fp16 are rounded, else to nearest.
        CHUNK: elements of a program. PART: of them at once.
    """
    piece = tl.load(owners + tl.program_id(0))
    row = pieces + piece * 4
    start = (tl.program_id(0) - tl.load(row + 3)) * CHUNK
    left = tl.minimum(tl.load(row) - start, CHUNK).to(tl.int32)
    piece_word = tl.load(row + 1)
    params = tl.load(addresses + piece)
    tables += tl.load(row + 2) * (2**PLANES + 1)
    decay = tl.load(tables + 2**PLANES)
    timed, flip = hash_of(tl.load(clock))
    keyed = mixed(timed, key)
    whole = tl.where(params % 16 == 0, left // PART * PART, 0)
    params = memory(params, PARAM) + start
    halves = (planes + piece_word).to(tl.pointer_type(tl.int32)) + start // 32
    first_word += piece_word + start // 64
    for done in range(0, whole, PART):
        apply_part(
            params, halves, plane_words * 2, done, left, tables, decay, keyed, flip, first_word,
            PARAM, PLANES, STOCHASTIC, PART, True,
        )  # fmt: skip
    for done in range(whole, left, PART):
        apply_part(
            params, halves, plane_words * 2, done, left, tables, decay, keyed, flip, first_word,
            PARAM, PLANES, STOCHASTIC, PART, False,
        )  # fmt: skip


def launch(kernel: Any) -> dict[str, Any]:
    """The options that `ballot` or `apply` is launched with."""
    return LAUNCH if torch.version.hip else LAUNCH | {"maxnreg": REGISTERS[kernel.fn.__name__]}
