"""The Triton kernels behind the schemas of `dlion.ops`, for tensors on a GPU; with `triton_*.py` all that knows Triton.

Every function has the arguments and gives the bits of its namesake in `reference.py`. A list of tensors is one launch
for each pair of dtypes in it. What the kernels do not know (float64, momenta of other dtypes, pieces on another device
than the first) goes to the reference, piece by piece. Nothing here waits for the device.

Under Triton's interpreter (TRITON_INTERPRET=1) the same functions take CPU tensors, which is how they are tested where
there is no GPU.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlion.ops import reference, triton_hash, triton_kernels, triton_tally
from dlion.ops.arguments import ballot_planes, check_rounding, check_tables, check_voters
from dlion.ops.bits import as_bytes
from dlion.ops.chunks import Chunks, awake_of, chunks, clock_of, hypers_of, roster_of_all
from dlion.ops.memory import present, put_back, those, with_rows

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MOMENTA = (torch.float32, torch.bfloat16)
INTERPRETED = not isinstance(triton_kernels.ballot, triton.JITFunction)


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
    t: int | Tensor,
    rank: int,
    zeros: str,
    awake: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.ballot`; t and `awake` may lie on the device, and nobody reads them here."""
    known = [
        fits and (grad is None or grad.device == momentum.device)
        for fits, grad, momentum in zip(_known(momenta, MOMENTA), grads, momenta, strict=True)
    ]
    if not all(known):
        rest: Any = (size, beta1s, beta2s, negate, first_word, t, rank, zeros, awake)
        words, finite = reference.ballot(*those(known, False, grads, momenta, offsets, groups), *rest)
        if not any(known):
            return words, finite
        others, fine = ballot(*those(known, True, grads, momenta, offsets, groups), *rest)
        return others | words.to(others.device), fine & finite.to(fine.device)
    device = momenta[0].device if momenta else None
    words = torch.zeros(ballot_planes(zeros), size // 64, dtype=torch.int64, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    numels = list(map(Tensor.numel, momenta))
    read, moved = _readable(grads, numels), list(map(Tensor.contiguous, momenta))
    usual = next((grad.dtype for grad in read if grad is not None), torch.float32)  # what is missing joins any launch
    kinds = [(usual if g is None else g.dtype, m.dtype) for g, m in zip(read, moved, strict=True)]
    betas = _betas(beta1s, beta2s, negate)
    for (dtype, kept), (g, m, *placed) in _by_kind(kinds, read, moved, numels, offsets, groups):
        cut = _cut("ballot", placed, size, len(negate), words.device)
        pairs = zip((0 if grad is None else grad.data_ptr() for grad in g), map(Tensor.data_ptr, m), strict=True)
        how = {"GRAD": DTYPES[dtype], "MOMENTUM": DTYPES[kept], "TERNARY": len(words) == 2}
        where = (words, finite, words.stride(0), first_word, rank, awake_of(awake, words.device))
        _launch(triton_kernels.ballot, cut, list(chain.from_iterable(pairs)), betas, t, where, how)
    put_back(momenta, moved)
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
    known = _known(params, DTYPES)
    if not all(known):
        rest: Any = (tables, decays, rounding, first_word, t, seed)
        for covered, run in ((True, apply), (False, reference.apply)):
            mine, starts, theirs = those(known, covered, params, offsets, groups)
            run(mine, planes, starts, theirs, *rest)
        return
    check_tables(tables, decays, len(planes))
    steps = 2 ** len(planes)
    hypers = [(*tables[steps * group :][:steps], decay) for group, decay in enumerate(decays)]
    _apply(
        params, planes, offsets, groups, tuple(chain.from_iterable(hypers)), len(decays), rounding, first_word, t, seed
    )


def knows(param: Tensor) -> bool:
    """Whether `apply_there` may be given this parameter."""
    return param.dtype in DTYPES and (INTERPRETED or param.device.type != "cpu")


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
    """`apply` by numbers that lie on the device and nobody reads.

    Args:
        params: of one device, each one that `knows`.
        numbers: f32[groups, 2**k + 1], a step for each level, and the decay. t: i64[].
    """
    _apply(params, planes, offsets, groups, numbers.view(-1), len(numbers), rounding, first_word, t, seed)


def _apply(
    params: list[Tensor],
    planes: Tensor,
    offsets: list[int],
    groups: list[int],
    hypers: tuple[float, ...] | Tensor,
    group_count: int,
    rounding: str,
    first_word: int,
    t: int | Tensor,
    seed: int,
) -> None:
    check_rounding(rounding)
    if not params:
        return
    planes = with_rows(planes.to(params[0].device))
    numels, moved = list(map(Tensor.numel, params)), list(map(Tensor.contiguous, params))
    for dtype, (mine, *placed) in _by_kind([param.dtype for param in moved], moved, numels, offsets, groups):
        cut = _cut("apply", placed, planes.shape[1] * 64, group_count, planes.device)
        stochastic = rounding == "stochastic" and dtype != torch.float32
        how = {"PARAM": DTYPES[dtype], "PLANES": len(planes), "STOCHASTIC": stochastic}
        where = (planes, planes.stride(0), first_word, ~seed)
        addresses = list(map(Tensor.data_ptr, mine))
        _launch(triton_kernels.apply, cut, addresses, hypers, t, where, how)
    put_back(params, moved)


def tally_majority(ballots: Tensor, first_word: int, t: int, ties: str) -> Tensor:
    return majority(ballots[:, None], _all(ballots), first_word, t, ties)[0]


def tally_majority_ternary(ballots: Tensor, first_word: int, t: int, ties: str) -> Tensor:
    return majority(ballots, _all(ballots), first_word, t, ties)


def tally_count(ballots: Tensor, planes: int) -> Tensor:
    return count(ballots[:, None], _all(ballots), planes)


def tally_count_ternary(ballots: Tensor, planes: int) -> Tensor:
    return count(ballots, _all(ballots), planes)


def hashed(tensor: Tensor, number: int) -> Tensor:
    flat = as_bytes(tensor)
    totals = torch.empty(-(-flat.numel() // (8 * triton_hash.WORDS)), dtype=torch.int64, device=flat.device)
    if totals.numel():
        with on(flat.device):
            triton_hash.sums[(totals.numel(),)](flat, totals, flat.numel(), number, **triton_hash.LAUNCH)
    return totals.sum()


def majority(ballots: Tensor, roster: Tensor, first_word: int, t: int | Tensor, ties: str) -> Tensor:
    """The majority of those who vote, zeros where nobody does: i64[rows, 1 or 2, words] -> i64[1 or 2, words].

    Args:
        roster: i64[1 + rows]: how many vote, then the rows of their ballots, voter after voter. t: also i64[].
    """
    moment = (clock_of(t, ballots.device), first_word)
    return _tally(triton_tally.majority, ballots, roster, ballots.shape[1], moment, TIES=ties)


def count(ballots: Tensor, roster: Tensor, planes: int) -> Tensor:
    """The count of those who vote, by such a roster: i64[rows, 1 or 2, words] -> i64[planes, words]."""
    return _tally(triton_tally.count, ballots, roster, planes, (), WANTED=planes)


def _all(ballots: Tensor) -> Tensor:
    check_voters(len(ballots))
    return roster_of_all(len(ballots), ballots.device)


def _tally(kernel: Any, ballots: Tensor, roster: Tensor, planes: int, moment: tuple[Any, ...], **how: Any) -> Tensor:
    rows, ballot_planes, words = ballots.shape
    check_voters(rows)
    ballots = with_rows(ballots)
    verdict = torch.empty(planes, words, dtype=torch.int64, device=ballots.device)
    how |= {"TERNARY": ballot_planes == 2, "PLANES": triton_tally.planes_for(rows)}
    where = (ballots.stride(0), ballots.stride(1), words)
    if verdict.numel():
        with on(ballots.device):
            programs = -(-words // triton_tally.WORDS)
            kernel[(programs,)](ballots, roster, verdict, *where, *moment, **how, **triton_tally.LAUNCH)
    return verdict


def _betas(beta1s: list[float], beta2s: list[float], negate: list[bool]) -> tuple[float, ...]:
    """Of each group the weights of momentum and gradient in the message, and of both in the moved momentum."""
    betas: list[float] = []
    for beta1, beta2, maximize in zip(beta1s, beta2s, negate, strict=True):
        sign = -1.0 if maximize else 1.0  # to negate the scalar gives the bits of a negated gradient
        betas += (beta1, sign * (1 - beta1), beta2, sign * (1 - beta2))
    return tuple(betas)


def _readable(grads: list[Tensor | None], numels: list[int]) -> list[Tensor | None]:
    """The gradients as the kernels read them: a copy of one that is not contiguous or has another dtype."""
    found, there = present(grads, numels)
    read = iter([(grad if grad.dtype in DTYPES else grad.float()).contiguous() for grad in found])
    return [next(read) if is_there else None for is_there in there] if there else list(read)


def _known(tensors: Sequence[Tensor], dtypes: Container[torch.dtype]) -> list[bool]:
    """Which of them the kernels know: of these dtypes, on the device of the first, if that is one they run on."""
    runs = not tensors or INTERPRETED or tensors[0].device.type != "cpu"
    return [runs and tensor.dtype in dtypes and tensor.device == tensors[0].device for tensor in tensors]


def _by_kind(kinds: Sequence[Any], *lists: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Each kind once, and of each list the entries of that kind."""
    for kind in dict.fromkeys(kinds):
        chosen = [other == kind for other in kinds]
        yield kind, lists if all(chosen) else those(chosen, True, *lists)


def _cut(verb: str, placed: list[list[int]], size: int, hypers: int, device: torch.device) -> Chunks:
    """The table of pieces, from what was sent before where the layout is the same."""
    numels, offsets, groups = map(tuple, placed)
    return chunks(verb, numels, offsets, groups, size, hypers, triton_kernels.CHUNK, device)


def _launch(
    kernel: Any,
    cut: Chunks,
    addresses: list[int],
    hypers: tuple[float, ...] | Tensor,
    t: int | Tensor,
    where: tuple[Any, ...],
    how: dict[str, Any],
) -> None:
    with on(cut.device):
        told = (cut.addresses(addresses), hypers_of(hypers, cut.device), clock_of(t, cut.device))
        if cut.count:
            kernel[(cut.count,)](*cut.here(), *told, *where, **how, **triton_kernels.launch(kernel))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
