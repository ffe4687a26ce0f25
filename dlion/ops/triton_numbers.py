"""The Triton kernel of the numbers that a verdict is applied by, as `dlion.resident.applying` specifies them."""

import triton
import triton.language as tl

LEVELS = 256  # at once
LAUNCH = {"num_warps": 1, "enable_fp_fusion": False}
MEANINGS = ("sign", "ternary", "count", "sum")


@triton.jit(do_not_specialize=list(range(3)))
def numbers(steps, voters, applied, MEANING: tl.constexpr, PLANES: tl.constexpr, LEVELS: tl.constexpr):
    """Of the group that is this program: a step for each level, and the decay; without voters nothing moves.

    Args:
        steps: f32[groups, 2**PLANES + 1]. voters: i64[1]. applied: f64[groups, 2], learning rate and weight decay.
        MEANING: of the planes of a verdict, one of `MEANINGS`. LEVELS: computed at once.
    """
    group = tl.program_id(0)
    steps += group * (2**PLANES + 1)
    voters = tl.load(voters)
    lr, weight_decay = tl.load(applied + 2 * group), tl.load(applied + 2 * group + 1)
    some = tl.maximum(voters, 1)
    for first in range(0, 2**PLANES, LEVELS):
        level = (first + tl.arange(0, LEVELS)).to(tl.int64)
        if MEANING == "sign":
            step = lr * (2 * level - 1).to(tl.float64)
        elif MEANING == "ternary":
            step = lr * ((level & 1) * ((level & 2) - 1)).to(tl.float64)
        else:
            said = 2 * level if MEANING == "count" else level
            step = lr * tl.minimum(said - voters, voters).to(tl.float64) / some.to(tl.float64)
        tl.store(steps + level, tl.where(voters > 0, step, 0.0).to(tl.float32))
    decay = 1.0 - lr * weight_decay
    tl.store(steps + 2**PLANES, tl.where(voters > 0, decay, 1.0).to(tl.float32))
