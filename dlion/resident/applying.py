"""Decay and step with scalars that only the device knows: the float64 numbers of a step, and `reference.apply`."""

import torch
from torch import Tensor

from dlion.codecs import CountPlanes, SignBits, SumPlanes, TernaryBits
from dlion.ops.arguments import check_pieces, check_rounding
from dlion.ops.reference import round_stochastic, stepped
from dlion.pipeline import Decoder


def numbers(down: Decoder, planes: int, voters: Tensor, applied: Tensor) -> Tensor:
    """What a verdict does to parameters, f64[groups, 2**planes + 1]: a step for each level, and the decay.

    Without voters nothing moves: every step is 0 and the decay 1.

    Args:
        down: what the planes of the verdict mean. planes: how many there are.
        voters: i64[]. applied: f64[groups, 2], learning rate and weight decay.
    """
    lr, weight_decay = applied.unbind(1)
    nobody = voters == 0
    steps = tables_of(down, planes, voters, lr).masked_fill(nobody, 0.0)
    return torch.cat([steps, decays_of(lr, weight_decay).masked_fill(nobody, 1.0)[:, None]], 1)


def tables_of(down: Decoder, planes: int, voters: Tensor, lr: Tensor) -> Tensor:
    """What each level of a verdict moves, f64[groups, 2**planes]: `Levels.table`, to the bit.

    Args:
        down: what the planes of the verdict mean. planes: how many there are.
        voters: i64[]; without any, what nobody is to apply.
        lr: f64[groups].
    """
    levels = torch.arange(2**planes, device=lr.device)
    if isinstance(down, SignBits):
        numerators, denominator = 2 * levels - 1, torch.ones_like(voters)
    elif isinstance(down, TernaryBits):
        numerators, denominator = (levels & 1) * ((levels & 2) - 1), torch.ones_like(voters)
    else:
        assert isinstance(down, CountPlanes | SumPlanes)
        said = 2 * levels if isinstance(down, CountPlanes) else levels
        numerators, denominator = torch.minimum(said - voters, voters), voters
    return lr[:, None] * numerators.double() / denominator.double()


def decays_of(lr: Tensor, weight_decay: Tensor) -> Tensor:
    """`1 - lr*weight_decay` of each group, f64[groups]."""
    return 1 - lr * weight_decay


def knows(param: Tensor) -> bool:
    """Whether `apply_there` may be given this parameter: any."""
    return True


def apply_there(
    params: list[Tensor],
    planes: Tensor,
    offsets: list[int],
    groups: list[int],
    numbers: Tensor,
    rounding: str,
    first_word: int,
    t: Tensor,
    seed: int,
) -> None:
    """`dlion.ops.reference.apply` by `numbers` that lie on the device; t, i64[], does too.

    Raises:
        ValueError: a piece lies outside the bucket or not on a word, or `rounding` is unknown.
    """
    check_pieces(offsets, [param.numel() for param in params], planes.shape[1] * 64)
    check_rounding(rounding)
    for param, offset, group in zip(params, offsets, groups, strict=True):
        flat = param.reshape(-1)
        first, last = offset // 64, offset // 64 + -(-flat.numel() // 64)
        moved = stepped(flat, planes[:, first:last], numbers[group, :-1], numbers[group, -1])
        if rounding == "stochastic":
            moved = round_stochastic(moved, param.dtype, first_word + first, t, ~seed)
        param.copy_(moved.view(param.shape))
