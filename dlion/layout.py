"""Parameters -> words, buckets and shards: one flat order that every worker shares.

Everything here follows from `param_groups` and `requires_grad` alone, never from which gradients exist.
"""

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

WORD = 64  # elements per word of one-bit ballots

NO_STATE: dict[Any, Any] = {}  # for `layout_key`, where the parameters alone count

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lives here: a DTensor's local shard, any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def has_mean(tensor: Tensor) -> bool:
    """Whether a mean over workers says something: of real and complex numbers, not of whole ones and truth values."""
    return tensor.is_floating_point() or tensor.is_complex()


def dtype_of_sums(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of `dtype` are added: at least float32; torch promotes no 8-bit floats by itself."""
    if dtype.itemsize == 1:
        return torch.float32
    return torch.promote_types(dtype, torch.float32)


def overwrite(tensor: Tensor, values: Tensor) -> None:
    """Make `values`, of the same shape, those of `tensor`; of an expanded tensor only what is stored is written."""
    stored = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor.detach()[stored].copy_(values[stored])


@dataclass(frozen=True)
class Slot:
    """One trainable tensor in the layout: `numel` elements in logical row-major order from element `first`."""

    group: int
    position: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    first: int


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a slot, found at element `offset` of a bucket."""

    slot: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """A run of elements exchanged together, `size` of them (padding included) from element `first` of the layout.

    `dtype` is the one that messages are computed in; `tails` are the words that hold padding: (word of the bucket, mask
    of its real elements). `groups` has each piece's parameter group, `cut` the places of the pieces that are not whole
    tensors.
    """

    number: int
    first: int
    size: int
    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    tails: tuple[tuple[int, int], ...]
    groups: list[int]
    cut: list[int]

    @property
    def first_word(self) -> int:
        return self.first // WORD

    @property
    def words(self) -> int:
        return self.size // WORD

    @cached_property
    def offsets(self) -> list[int]:
        return [piece.offset for piece in self.pieces]

    @cached_property
    def slots(self) -> list[int]:
        return [piece.slot for piece in self.pieces]


@dataclass(frozen=True)
class Layout:
    """The flat order of all trainable tensors, and its cut into buckets.

    Attributes:
        slots: one per trainable tensor, in `param_groups` order.
        buckets: at least one, even when there is nothing to exchange.
        numel: trainable parameters without padding.
    """

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    numel: int

    @staticmethod
    def of(param_groups: list[dict[str, Any]], bucket_elements: int, align: int) -> "Layout":
        """Lay out the trainable tensors of `param_groups`, each starting on a multiple of `align` elements."""
        slots: list[Slot] = []
        first = 0
        for group, position, name, param in named(param_groups):
            if not param.requires_grad:
                continue
            here = local(param)
            slots.append(Slot(group, position, name, tuple(here.shape), here.dtype, here.numel(), first))
            first += -(-here.numel() // align) * align
        return Layout(tuple(slots), _cut(slots, first, bucket_elements), sum(slot.numel for slot in slots))


def named(param_groups: list[dict[str, Any]]) -> list[tuple[int, int, str, Tensor]]:
    """(group, position in it, name, parameter) of every parameter, frozen ones included."""
    found = []
    for index, group in enumerate(param_groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            name = names[position] if names else f"parameter {position} of group {index}"
            found.append((index, position, name, param))
    return found


_trains, _dtype, _shape = attrgetter("requires_grad"), attrgetter("dtype"), attrgetter("shape")
_grad, _layout = attrgetter("grad"), attrgetter("layout")


def layout_key(param_groups: list[dict[str, Any]], state: Any) -> tuple[Any, ...]:
    """Changes when the layout may have changed, or a tensor's state came, went or was replaced.

    It is looked at in every step, so neither Python runs for each tensor nor does the key hold what the garbage
    collector counts: a tuple for each of a thousand tensors would have it run several times a step.

    Raises:
        ValueError: a gradient is sparse.
    """
    kept = state.values()
    key: list[Any] = [id(param_groups), id(state), *map(id, state), *map(id, kept), *map(len, kept)]
    for group in param_groups:
        params = group["params"]
        grads = [grad for grad in map(_grad, params) if grad is not None]
        if set(map(_layout, grads)) - {torch.strided}:
            for param in params:
                check_dense(param)
        key += (len(params), *map(id, params), *map(_trains, params), *map(_dtype, params))
        key += map(hash, map(_shape, params))
    return tuple(key)


def check_dense(param: Tensor) -> None:
    """Raises ValueError where the gradient is sparse."""
    if param.grad is not None and param.grad.layout is not torch.strided:
        raise ValueError(
            f"a gradient of shape {list(param.shape)} is sparse and votes need dense ones: make the layer with "
            "sparse=False"
        )


def _cut(slots: list[Slot], total: int, bucket_elements: int) -> tuple[Bucket, ...]:
    buckets = []
    following = 0  # the first slot that reaches into the bucket at hand
    for number, first in enumerate(range(0, max(total, 1), bucket_elements)):
        end = min(first + bucket_elements, total)
        pieces = []
        while following < len(slots) and slots[following].first + slots[following].numel <= first:
            following += 1
        for index in range(following, len(slots)):
            slot = slots[index]
            if slot.first >= end:
                break
            start, stop = max(first - slot.first, 0), min(end - slot.first, slot.numel)
            if start < stop:
                pieces.append(Piece(index, start, stop, slot.first + start - first))
        wide = any(slots[piece.slot].dtype == torch.float64 for piece in pieces)
        dtype = torch.float64 if wide else torch.float32
        groups = [slots[piece.slot].group for piece in pieces]
        cut = [k for k, piece in enumerate(pieces) if piece.stop - piece.start < slots[piece.slot].numel]
        buckets.append(Bucket(number, first, end - first, tuple(pieces), dtype, _tails(pieces), groups, cut))
    return tuple(buckets)


def _tails(pieces: list[Piece]) -> tuple[tuple[int, int], ...]:
    ends = [piece.offset + piece.stop - piece.start for piece in pieces]
    return tuple((end // WORD, (1 << end % WORD) - 1) for end in ends if end % WORD)


def into_shards(header: Tensor, planes: Tensor, shards: int) -> Tensor:
    """The rows of equal shards, each behind the same header: T[planes, n] -> T[shards, header + planes*ceil(n/shards)].

    The shards at the end are filled up with zeros. The one copy of a ballot is made here.
    """
    count, length = planes.shape
    width = -(-length // shards)
    rows = planes.new_empty(shards, header.numel() + count * width)
    rows[:, : header.numel()] = header
    places = rows[:, header.numel() :].view(shards, count, width)
    whole = length // max(width, 1)
    places[:whole] = planes[:, : whole * width].view(count, whole, width).transpose(0, 1)
    if whole < shards:
        rest = length - whole * width
        places[whole:] = 0
        places[whole, :, :rest] = planes[:, whole * width :]
    return rows


def from_shards(rows: Tensor, planes: int, length: int) -> Tensor:
    """T[shards, planes * m], without headers -> T[planes, length]: one copy."""
    shards, width = rows.shape
    return rows.view(shards, planes, width // planes).transpose(0, 1).reshape(planes, -1)[:, :length]
