"""Numbers, words and comparisons for the tests of kernels that must give the bits of the reference."""

from types import ModuleType

import torch
from torch import Tensor

from dlion.ops import reference

Pieces = list[Tensor]

SIZES = [0, 1, 63, 64, 65, 1000, 4097]
LARGE = 2**20 + 3
HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES]
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 2.0**-126, -(2.0**-127), 1.0, -1.0, 3.0, 1e30, -1e30]
SPECIAL += [65504.0, 65519.0, 65520.0, 65535.0, 65536.0, 6e-8, 2.0**-14, 2.0**-24, 3.38e38]
NOT_FINITE = [float("inf"), float("-inf"), float("nan")]


def numbers(size: int, seed: int, special: list[float] = SPECIAL) -> Tensor:
    """f32[size] of all magnitudes, with every special value somewhere if there is room."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-12, 5, (size,), generator=generator)
    where = torch.randperm(size, generator=generator)[: len(special) * 4]
    values[where] = torch.tensor(special * 4)[: len(where)]
    return values


def random_words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(seed))


def sparse_words(*shape: int) -> Tensor:
    """Words whose bits are mostly equal, so that counts come near 0 and near all."""
    return random_words(*shape, seed=1) & random_words(*shape, seed=2) & random_words(*shape, seed=3)


def pattern(tensor: Tensor) -> Tensor:
    """The bits of a tensor; every NaN is one, for torch itself writes several."""
    whole = torch.where(tensor.isnan(), torch.tensor(float("nan"), dtype=tensor.dtype), tensor)
    return whole.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(pattern(a), pattern(b))


def offsets_of(pieces: Pieces, gap: int = 0) -> tuple[list[int], int]:
    """Each piece on a word, `gap` words apart; and the size of the bucket."""
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += -(-piece.numel() // 64) * 64 + 64 * gap
    return offsets, end


def assert_ballots_agree(
    kernels: ModuleType,
    grads: list[Tensor | None],
    momenta: Pieces,
    t: int,
    zeros: str,
    gap: int = 0,
    awake: Tensor | None = None,
) -> None:
    offsets, size = offsets_of(momenta, gap)
    groups = [k % 2 for k in range(len(momenta))]
    rest = (offsets, groups, size, [0.9, 0.95], [0.99, 0.98], [False, True], 2**33 + 7, t, 5, zeros)
    mine, theirs = ([piece.clone() for piece in momenta] for _ in range(2))
    told = rest if awake is None else (*rest, awake)  # kernels of the CPU never get it
    words, finite = kernels.ballot(grads, mine, *told)
    wanted, fine = reference.ballot(grads, theirs, *told)
    assert torch.equal(words, wanted) and words.shape == wanted.shape
    assert finite.dtype == torch.bool and bool(finite) == bool(fine)
    assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))


def assert_verdicts_agree(
    kernels: ModuleType, params: Pieces, planes: int, rounding: str, t: int, seed: int = 12
) -> None:
    offsets, size = offsets_of(params)
    verdict = random_words(planes, size // 64)
    groups = [k % 2 for k in range(len(params))]
    tables = [(level + 1) * 1.37e-3 * (-1) ** level for level in range(2 * 2**planes)]
    rest = (verdict, offsets, groups, tables, [0.999, 1.0], rounding, 2**33 + 7, t, seed)
    mine, theirs = ([piece.clone() for piece in params] for _ in range(2))
    kernels.apply(mine, *rest)
    reference.apply(theirs, *rest)
    for a, b in zip(mine, theirs, strict=True):
        assert same(a, b)
