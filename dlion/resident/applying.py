"""Decay and step with scalars that only the device knows: the float64 numbers of a step, and `reference.apply`."""

import torch
from torch import Tensor

from dlion.codecs import CountPlanes, SignBits, SumPlanes, TernaryBits
from dlion.ops.arguments import check_pieces, check_rounding
from dlion.ops.reference import ballot as ballot  # takes t as a tensor too
from dlion.ops.reference import round_stochastic, stepped
from dlion.pipeline import Decoder


def tables_of(down: Decoder, planes: int, voters: Tensor, lr: Tensor) -> Tensor:
    """What each level of a verdict moves, f64[groups, 2**planes]: `Levels.table`, to the bit.

    Args:
        down: what the planes of the verdict mean. planes: how many there are.
        voters: i64[]; without any, numbers that nobody is to apply.
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
    tables: Tensor,
    decays: Tensor,
    rounding: str,
    first_word: int,
    t: Tensor,
    seed: int,
    go: Tensor,
) -> None:
    """`dlion.ops.reference.apply` where `go` says so; elsewhere the parameters keep every bit.

    Args:
        tables: f64[groups, 2**k]. decays: f64[groups]. t: i64[]. go: bool[].

    Raises:
        ValueError: a piece lies outside the bucket or not on a word, or `rounding` is unknown.
    """
    check_pieces(offsets, [param.numel() for param in params], planes.shape[1] * 64)
    check_rounding(rounding)
    for param, offset, group in zip(params, offsets, groups, strict=True):
        flat = param.reshape(-1)
        first, last = offset // 64, offset // 64 + -(-flat.numel() // 64)
        moved = stepped(flat, planes[:, first:last], tables[group], decays[group])
        if rounding == "stochastic":
            moved = round_stochastic(moved, param.dtype, first_word + first, t, ~seed)
        param.copy_(torch.where(go, moved.to(param.dtype), flat).view(param.shape))
