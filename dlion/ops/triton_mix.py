"""`mix64` of bits.py inside Triton kernels, round by round, and what ballots and parameters draw from it.

Each round costs 24 instructions, so a kernel takes those that many elements share only once.
"""

import triton
import triton.language as tl

from dlion.ops.bits import GOLDEN, MULTIPLIERS

_GOLDEN, _FIRST, _SECOND = (tl.constexpr(number) for number in (GOLDEN, *MULTIPLIERS))


@triton.jit
def finalise(x):
    """The splitmix64 finaliser of unsigned numbers; see `mix64` in bits.py."""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def mixed(before, number):
    """The next round of `mix64`."""
    return finalise((before ^ number.to(tl.uint64)) + _GOLDEN)


@triton.jit
def hash_of(t):
    """Of t the first round of `mix64`, and what complements its last: all bits where t is odd."""
    return mixed(tl.zeros([], tl.uint64), t >> 1), (0 - (t & 1)).to(tl.uint64)


@triton.jit
def random_bits(keyed, flip, first_word, PART: tl.constexpr):
    """16 bits for each element, u32[PART], as `round_stochastic` draws them.

    Args:
        keyed: two rounds of `mix64`. flip: all bits to complement the third.
    """
    drawn = mixed(keyed, first_word * 16 + tl.arange(0, PART // 4)) ^ flip
    halves = tl.join(drawn.to(tl.uint32), (drawn >> 32).to(tl.uint32))
    return tl.join(halves & 0xFFFF, halves >> 16).reshape(PART)


@triton.jit
def zero_bits(timed, flip, rank, first_word, PART: tl.constexpr):
    """For each quarter of a word that quarter of its hash which ballots take where they are zero: i32[PART / 16]."""
    quarter = tl.arange(0, PART // 16)
    noise = mixed(mixed(timed, first_word + quarter // 4), rank) ^ flip
    return (noise >> (quarter % 4 * 16).to(tl.uint64)).to(tl.int32)
