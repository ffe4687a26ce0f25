"""How kernels that torch did not make take its tensors: contiguous memory in, what changed back out."""

from collections.abc import Sequence
from itertools import compress
from operator import is_not
from typing import Any

import torch
from torch import Tensor


def those(known: Sequence[bool], wanted: bool, *lists: Sequence[Any]) -> Any:
    """Of each list, the entries of the pieces that the kernels know, or of the others."""
    return [[value for value, is_known in zip(values, known, strict=True) if is_known is wanted] for values in lists]


def present(grads: list[Tensor | None], numels: list[int]) -> tuple[list[Tensor], list[bool] | None]:
    """The gradients that are there, and for each piece whether it has one; None: all have.

    Raises:
        ValueError: one has not as many elements as its piece.
    """
    found = [grad for grad in grads if grad is not None]
    there = [grad is not None for grad in grads] if len(found) < len(grads) else None
    wanted = list(compress(numels, there)) if there else numels
    if list(map(Tensor.numel, found)) != wanted or len(grads) != len(numels):
        raise ValueError("every gradient must have as many elements as the momentum beside it")
    return found, there


def with_rows(words: Tensor) -> Tensor:
    """Words that follow each other in the last dimension: a copy where they do not."""
    return words if words.stride(-1) == 1 or words.shape[-1] < 2 else words.contiguous()


def put_back(tensors: list[Tensor], moved: list[Tensor]) -> None:
    """Let autograd know what changed, and write back what was a copy."""
    torch.autograd.graph.increment_version(tensors)
    if any(map(is_not, tensors, moved)):
        for tensor, copy in zip(tensors, moved, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)
