"""The Triton kernel that hashes a tensor: what replicas and gradients are compared by, read once and where it lies."""

import triton
import triton.language as tl

from dlion.ops.triton_mix import finalise, mixed

WORDS = 1024  # of a program: 8 for each of its 128 threads
LAUNCH = {"WORDS": WORDS, "num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def word_at(memory, first, at, left):
    """The 64-bit words from `first` on, byte by byte; zeros where there are no bytes."""
    word = tl.zeros_like(at).to(tl.int64)
    for byte in tl.static_range(8):
        there = at * 8 + byte < left
        word |= tl.load(memory + first * 8 + at * 8 + byte, mask=there, other=0).to(tl.int64) << 8 * byte
    return word


@triton.jit(do_not_specialize=list(range(4)))
def sums(memory, totals, nbytes: tl.int64, number: tl.int64, WORDS: tl.constexpr):
    """Of each run of words the sum that `bits.hashed` makes.

    Args:
        memory: u8[nbytes]. totals: i64[programs]. number: of the tensor. WORDS: of a program.
    """
    first = tl.program_id(0).to(tl.int64) * WORDS
    left = tl.minimum(nbytes - first * 8, WORDS * 8).to(tl.int32)
    at = tl.arange(0, WORDS)
    if (left == WORDS * 8) & (memory.to(tl.int64) % 16 == 0):
        whole = tl.multiple_of(memory.to(tl.int64).to(tl.pointer_type(tl.int64)) + first, 16)
        words = tl.load(whole + at)
    else:
        words = word_at(memory, first, at, left)
    nothing = tl.zeros([], tl.uint64)
    weight = mixed(mixed(mixed(nothing, number), first + at), nothing) | 1
    tl.store(totals + tl.program_id(0), tl.sum((finalise(words.to(tl.uint64)) * weight).to(tl.int64)))
