"""The specification of every kernel, in pure torch: exact arithmetic, exact bits, any device.

Words are int64 tensors: bit j of word w is element 64*w + j of the flat layout. Products and sums are separate
operations, each rounded, because fused multiply-add differs between processors and replicas must agree to the bit.

Where `t` may be an i64[], it lies on the device and Python never reads it. Nor is torch.where given plain numbers,
which it sends to the device and waits for.
"""

import torch
from torch import Tensor

from dlion.ops.arguments import ballot_planes, check_pieces, check_rounding, check_tables
from dlion.ops.bits import Whole, count, less_or_more, levels, mix64, pack, split
from dlion.ops.bits import hashed as hashed  # an operator like those below

# In the middle of a hash stands a word for zeros of a ballot, the complement of a seed for parameters, and this plus
# the rank for momenta: three ranges that do not meet, so what is drawn for one says nothing of the others.
MOMENTUM_KEYS = 2**62

SMALLEST_MOMENTUM = 2.0**-126  # below it a float32 is denormal, and denormals make a ballot 13 times slower


def lion_message(
    grad: Tensor,
    momentum: Tensor,
    beta1: float,
    beta2: float,
    first_word: int,
    t: Whole,
    rank: int,
    awake: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Lion's message, and the momentum moved in place (arXiv 2404.00438, Algorithm 1).

    Args:
        grad: f[n], any float dtype; already negated when maximizing.
        momentum: f[n], float32 or float64, modified in place: `m = b2*m + (1-b2)*g`; or bfloat16, computed in float32
            and rounded up or down with the odds of the distance, since a small `(1-b2)*g` is lost by rounding to
            nearest: with b2=0.99 and a constant gradient of 1 it then stays at 0.80.
        beta1, beta2: rounded once from float64.
        first_word, t, rank: as in `ballot`; what bfloat16 is rounded by follows from them. awake: as there.

    Returns:
        `b1*m + (1-b1)*g` with the old m, f[n], 0 where it is not finite; and bool[], whether all of it was. Where it is
        not, momentum keeps its value, and also where rounding up would make a bfloat16 infinite.
    """
    m = momentum.float() if momentum.dtype == torch.bfloat16 else momentum
    g = grad.to(m.dtype)
    message = m * beta1 + g * (1 - beta1)
    finite = message.isfinite()  # neither a gradient nor a loaded momentum that is not may become a vote
    moved = m * beta2 + g * (1 - beta2)
    moved = moved.masked_fill(moved.abs() < SMALLEST_MOMENTUM, 0.0)
    fine = finite
    if momentum.dtype == torch.bfloat16:
        moved = round_stochastic(moved.reshape(-1), momentum.dtype, first_word, t, MOMENTUM_KEYS + rank).view(
            moved.shape
        )
        fine = finite & moved.isfinite()
    if awake is not None:
        fine = fine & awake
    momentum.copy_(torch.where(fine, moved, momentum))
    return message.masked_fill(~finite, 0.0), finite.all()


def pack_signs(message: Tensor, first_word: int, t: Whole, rank: int) -> Tensor:
    """One bit per element: 1 for positive; an exact zero takes its bit from a hash that the next step complements.

    Args:
        message: f[64*words].
        first_word: number of the first word in the whole layout.
        t: verdicts applied so far. rank: of this worker in the voting group.

    Returns:
        i64[words].
    """
    words = torch.arange(first_word, first_word + message.numel() // 64, device=message.device)
    noise = mix64(t // 2, words, rank) ^ -(t % 2)
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
    won, tied = split(planes, voters // 2)
    if voters % 2:
        return won
    words = torch.arange(first_word, first_word + ballots.shape[1], device=ballots.device)
    if ties == "rotate":
        decider = ballots.gather(0, ((t // 2 + words) % voters)[None])[0]
    else:
        decider = alternating(words, t)
    return won | (tied & decider)


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
        decider = alternating(words, t) & somebody
    return torch.stack([~tied | somebody, more | (tied & decider)])


def tally_count(ballots: Tensor, planes: int) -> Tensor:
    """i64[voters, words] -> i64[planes, words]: how many voted +1, as a binary number in bit planes, lowest first."""
    return padded(count(ballots), planes)


def tally_count_ternary(ballots: Tensor, planes: int) -> Tensor:
    """i64[voters, 2, words] -> i64[planes, words]: sum of the votes plus the number of voters, lowest bit first."""
    nonzero, positive = ballots[:, 0], ballots[:, 1]
    addends = torch.cat([positive, positive, ~nonzero])  # a vote plus one: +1 -> 2, 0 -> 1, -1 -> 0
    return padded(count(addends), planes)


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
    t: Whole,
    rank: int,
    zeros: str,
    awake: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One bucket's ballot from the pieces in it: `lion_message`, then `pack_signs` or `pack_ternary`, in one call.

    Piece k is a whole tensor or a slice of one, its elements in logical row-major order; it starts at element
    `offsets[k]` of the bucket and takes the hyper-parameters of group `groups[k]`.

    Args:
        grads: f[...] of as many elements as the momentum beside it; None counts as zero.
        momenta: f[...], float32, float64 or bfloat16, modified in place.
        offsets: multiples of 64; pieces do not overlap.
        size: elements of the bucket, padding included; a multiple of 64.
        beta1s, beta2s, negate: of each group; `negate` where it maximizes.
        first_word: number of the bucket's first word in the whole layout.
        t: verdicts applied so far. rank: of this worker in the voting group.
        zeros: "balanced": one bit per element; "exact": ternary.
        awake: bool[], False where no momentum may move; for steps on a device, whose host does not know. None: True.

    Returns:
        i64[1, size/64], or i64[2, size/64] for "exact", where padding is 0; and bool[], whether all was finite.

    Raises:
        ValueError: a piece lies outside the bucket or not on a word, or `zeros` is unknown.
    """
    check_pieces(offsets, [momentum.numel() for momentum in momenta], size)
    device = momenta[0].device if momenta else None
    words = torch.zeros(ballot_planes(zeros), size // 64, dtype=torch.int64, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    for grad, momentum, offset, group in zip(grads, momenta, offsets, groups, strict=True):
        if not momentum.numel():
            continue
        g = torch.zeros_like(momentum) if grad is None else grad.reshape(momentum.shape)
        first = offset // 64
        where = (first_word + first, t, rank)
        g = -g if negate[group] else g
        message, fine = lion_message(g, momentum, beta1s[group], beta2s[group], *where, awake)
        flat = torch.nn.functional.pad(message.reshape(-1), (0, -message.numel() % 64))
        if zeros == "exact":
            said = pack_ternary(flat)
        else:
            said = pack_signs(flat, *where)[None]
            if message.numel() % 64:
                said[:, -1] &= (1 << message.numel() % 64) - 1
        words[:, first : first + said.shape[1]] = said
        finite = finite & fine.to(finite.device)
    return words, finite


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
    """Apply one bucket's verdict to the pieces in it: `p = p*decay - table[level]`.

    Args:
        params: f[...], modified in place; pieces as in `ballot`.
        planes: i64[k, words of the bucket]: the level of each element in bit planes, lowest bit first.
        tables: the steps of the 2**k levels in each group, one group after another, float64, rounded once to the dtype
            computed in. decays: `1 - lr*weight_decay` of each group.
        rounding: of bf16 and fp16, computed in float32: "nearest", or "stochastic" as `round_stochastic` does.
        first_word, t: as in `ballot`. seed: of the rounding, equal on all workers.

    Raises:
        ValueError: a piece lies outside the bucket or not on a word, a table has another length, or `rounding` is
            unknown.
    """
    check_pieces(offsets, [param.numel() for param in params], planes.shape[1] * 64)
    check_tables(tables, decays, len(planes))
    check_rounding(rounding)
    steps = 2 ** len(planes)
    for param, offset, group in zip(params, offsets, groups, strict=True):
        flat = param.reshape(-1)
        first, last = offset // 64, offset // 64 + -(-flat.numel() // 64)
        table = torch.tensor(tables[group * steps :][:steps], dtype=torch.float64, device="cpu").to(flat.device)
        moved = stepped(flat, planes[:, first:last].to(flat.device), table, decays[group])
        if rounding == "stochastic":
            moved = round_stochastic(moved, param.dtype, first_word + first, t, ~seed)
        param.copy_(moved.view(param.shape))


def round_stochastic(values: Tensor, dtype: torch.dtype, first_word: int, t: Whole, key: int) -> Tensor:
    """f32[n] -> dtype[n]: up or down with the odds of the distance, so that small updates survive on average.

    Element e of the layout takes 16 bits, lane `e % 4` of `mix64(t//2, key, e//4)`, complemented when t is odd, so
    that what one step gains by rounding the next loses. bf16: added to the 16 bits that are dropped. fp16: its
    upper 13 bits to the 13 dropped; below 2**-14, where fp16 has steps of 2**-24, to the first 16 bits of the
    fraction of a step. Values of 2**16 and more in fp16, infinities and NaN are rounded to nearest. float32 and
    float64 stay as they are.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return values
    quads = torch.arange(first_word * 16, first_word * 16 + -(-values.numel() // 4), device=values.device)
    noise = mix64(t // 2, key, quads) ^ -(t % 2)
    random = (noise[:, None] >> torch.arange(0, 64, 16, device=noise.device)) & 0xFFFF
    pattern = values.view(torch.int32).long() & 0xFFFFFFFF
    r = random.view(-1)[: values.numel()]
    if dtype == torch.bfloat16:
        bits = (pattern + r) >> 16
        fine = values.isfinite()
    else:
        magnitude = pattern & 0x7FFFFFFF
        small = ((values.abs() * 2.0**40).clamp(max=2.0**26).long() + r) >> 16
        normal = (magnitude + (r >> 3) - (112 << 23)) >> 13
        bits = torch.where(magnitude < 113 << 23, small, normal) | (pattern >> 16 & 0x8000)
        fine = values.abs() < 2.0**16
    return torch.where(fine, bits.to(torch.int16).view(dtype), values.to(dtype))


def stepped(param: Tensor, planes: Tensor, table: Tensor, decay: float | Tensor) -> Tensor:
    """`p*decay - table[level]`, float64 for float64 parameters, else float32: of a flat piece, f[n].

    Args:
        table: f64[2**k]. decay: also f64[]. Both are rounded once to the dtype computed in.
    """
    wide = param if param.dtype == torch.float64 else param.float()
    step = table.to(wide.dtype).index_select(0, levels(planes)[: param.numel()])
    return wide * (decay.to(wide.dtype) if isinstance(decay, Tensor) else decay) - step


def alternating(words: Tensor, t: Whole) -> Tensor:
    """All bits of every second word and step."""
    return -((words + t) % 2 == 0).long()


def padded(counted: list[Tensor], planes: int) -> Tensor:
    """The lowest planes of a count, i64[planes, words], with zeros for those that it does not need."""
    return torch.stack(counted[:planes] + [torch.zeros_like(counted[0])] * (planes - len(counted)))
