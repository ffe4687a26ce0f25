"""The specification of every kernel, in pure torch: exact arithmetic, exact bits, any device.

Words are int64 tensors: bit j of word w is element 64*w + j of the flat layout. Products and sums are separate
operations, each rounded, because fused multiply-add differs between processors and replicas must agree to the bit.
"""

import torch
from torch import Tensor

from dlion.ops.bits import count, equals, exceeds, less_or_more, levels, mix64, pack

SMALLEST_MOMENTUM = 2.0**-126  # below it a float32 is denormal, and denormals make a ballot 13 times slower


def lion_message(grad: Tensor, momentum: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """Lion's message, and the momentum moved in place (arXiv 2404.00438, Algorithm 1).

    Args:
        grad: f[n], any float dtype; already negated when maximizing.
        momentum: f[n], float32 or float64, modified in place: `m = b2*m + (1-b2)*g`.
        beta1, beta2: rounded once from float64.

    Returns:
        `b1*m + (1-b1)*g` with the old m, f[n], 0 where the gradient is not finite; and bool[], whether all of it was
        finite. Where it is not, momentum keeps its value.
    """
    g = grad.to(momentum.dtype)
    finite = g.isfinite()
    message = momentum * beta1 + g * (1 - beta1)
    moved = momentum * beta2 + g * (1 - beta2)
    moved = torch.where(moved.abs() < SMALLEST_MOMENTUM, 0.0, moved)
    momentum.copy_(torch.where(finite, moved, momentum))
    return torch.where(finite, message, 0.0), finite.all()


def pack_signs(message: Tensor, first_word: int, t: int, rank: int) -> Tensor:
    """One bit per element: 1 for positive; an exact zero takes its bit from a hash that the next step complements.

    Args:
        message: f[64*words].
        first_word: number of the first word in the whole layout.
        t: verdicts applied so far. rank: of this worker in the voting group.

    Returns:
        i64[words].
    """
    words = torch.arange(first_word, first_word + message.numel() // 64, device=message.device)
    noise = mix64(t // 2, words, rank)
    if t % 2:
        noise = ~noise
    return pack(message > 0) | (pack(message == 0) & noise)


def pack_ternary(message: Tensor) -> Tensor:
    """f[64*words] -> i64[2, words]: the planes "nonzero" and "positive"."""
    return torch.stack([pack(message != 0), pack(message > 0)])


def tally_majority(ballots: Tensor, first_word: int, t: int, ties: str) -> Tensor:
    """Majority of one-bit ballots, counted without unpacking.

    Args:
        ballots: i64[voters, words], in rank order; at least one voter.
        first_word: number of the first of these words in the whole layout.
        t: verdicts applied so far.
        ties: "rotate": the vote of voter `(t//2 + word) mod voters`; "alternate": +1 when `t + word` is even.

    Returns:
        i64[words].
    """
    voters = ballots.shape[0]
    planes = count(ballots)
    won = exceeds(planes, voters // 2)
    if voters % 2:
        return won
    words = torch.arange(first_word, first_word + ballots.shape[1], device=ballots.device)
    if ties == "rotate":
        decider = ballots.gather(0, ((t // 2 + words) % voters)[None])[0]
    else:
        decider = _alternating(words, t)
    return won | (equals(planes, voters // 2) & decider)


def tally_majority_ternary(ballots: Tensor, first_word: int, t: int, ties: str) -> Tensor:
    """Majority of ternary ballots: a zero abstains at its element.

    Args:
        ballots: i64[voters, 2, words], planes "nonzero" and "positive"; at least one voter.
        ties: "rotate": the first non-zero voter at or cyclically after voter `(t//2 + word) mod voters`; "alternate";
            "zero": no move.

    Returns:
        i64[2, words], planes "nonzero" and "positive".
    """
    nonzero, positive = ballots[:, 0], ballots[:, 1]
    less, more = less_or_more(count(positive), count(nonzero & ~positive))
    tied = ~(less | more)
    if ties == "zero":
        return torch.stack([~tied, more])
    words = torch.arange(first_word, first_word + ballots.shape[2], device=ballots.device)
    somebody = torch.zeros_like(tied)
    decider = torch.zeros_like(tied)
    for k in range(len(ballots)):
        row = ((t // 2 + words + k) % len(ballots))[None]
        decider |= positive.gather(0, row)[0] & ~somebody
        somebody |= nonzero.gather(0, row)[0]
    if ties == "alternate":
        decider = _alternating(words, t) & somebody
    return torch.stack([~tied | somebody, more | (tied & decider)])


def tally_count(ballots: Tensor, planes: int) -> Tensor:
    """i64[voters, words] -> i64[planes, words]: how many voted +1, as a binary number in bit planes, lowest first."""
    return _padded(count(ballots), planes, ballots[0])


def tally_count_ternary(ballots: Tensor, planes: int) -> Tensor:
    """i64[voters, 2, words] -> i64[planes, words]: sum of the votes plus the number of voters, lowest bit first."""
    nonzero, positive = ballots[:, 0], ballots[:, 1]
    addends = torch.cat([positive, positive, ~nonzero])  # a vote plus one: +1 -> 2, 0 -> 1, -1 -> 0
    return _padded(count(addends), planes, ballots[0, 0])


def apply_levels(param: Tensor, planes: Tensor, table: list[float], decay: float) -> None:
    """Move `param` in place: `p = p*decay - table[level]`, the level of an element read from the bit planes.

    Args:
        param: f[n], contiguous, modified in place. bf16 and fp16 are computed in float32 and rounded once.
        planes: i64[k, ceil(n/64)], lowest bit first.
        table: step for each of the 2**k levels that occur, float64, rounded once to the dtype computed in.
        decay: `1 - lr*weight_decay`.
    """
    wide = param if param.dtype == torch.float64 else param.float()
    steps = torch.tensor(table, dtype=torch.float64).to(device=wide.device, dtype=wide.dtype)
    step = steps.index_select(0, levels(planes)[: param.numel()])
    param.copy_(wide * decay - step)


def _alternating(words: Tensor, t: int) -> Tensor:
    return torch.where((words + t) % 2 == 0, -1, 0)


def _padded(counted: list[Tensor], planes: int, like: Tensor) -> Tensor:
    return torch.stack(counted[:planes] + [torch.zeros_like(like)] * (planes - len(counted)))
