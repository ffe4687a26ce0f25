"""Parameters -> words, buckets and shards: one flat order that every worker shares.

Everything here follows from `param_groups` and `requires_grad` alone, never from which gradients exist.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

AnyTensor = TypeVar("AnyTensor", Tensor, Tensor | None)

WORD = 64  # elements per word of one-bit ballots

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lives here: a DTensor's local shard, any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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


class Replica:
    """One worker's parameters, gradients and state, seen as flat slices in the order of a layout.

    Parameters and gradients stay where they are; a slice of a tensor that is not contiguous is a copy, which
    `write` puts back.

    Attributes:
        hypers: of each group the hyper-parameters, plain numbers, as they were when the step began.
    """

    def __init__(self, param_groups: list[dict[str, Any]], state: Any) -> None:
        self.param_groups = param_groups
        self.state = state
        self.hypers: list[dict[str, Any]] = []
        self.params = [param for _, _, _, param in named(param_groups) if param.requires_grad]
        self._group = [
            index for index, group in enumerate(param_groups) for param in group["params"] if param.requires_grad
        ]
        self._sharded = any(hasattr(param, "to_local") for param in self.params)

    @cached_property
    def _kept(self) -> list[dict[str, Any]]:
        """The state of each slot. Who puts another in its place changes `layout_key`, and gets another replica."""
        return [self.state[param] for param in self.params]

    def group(self, slot: int) -> dict[str, Any]:
        """The parameter group of a slot."""
        return self.param_groups[self._group[slot]]

    def hyper(self, slot: int) -> dict[str, Any]:
        """The hyper-parameters of a slot in this step."""
        return self.hypers[self._group[slot]]

    def gradient(self, piece: Piece) -> Tensor:
        """f[n]: the local gradient; zeros where there is none."""
        param = self.params[piece.slot]
        if param.grad is None:
            return local(param).new_zeros(()).expand(piece.stop - piece.start)
        return local(param.grad).reshape(-1)[piece.start : piece.stop]

    def momentum(self, piece: Piece) -> Tensor:
        """f[n], a view of `state[param]["exp_avg"]`."""
        momentum: Tensor = self.state[self.params[piece.slot]]["exp_avg"]
        return local(momentum).view(-1)[piece.start : piece.stop]

    def parameter(self, piece: Piece) -> Tensor:
        """f[n]: a view, or a copy where the parameter is not contiguous."""
        return local(self.params[piece.slot]).detach().reshape(-1)[piece.start : piece.stop]

    def parameters(self, bucket: Bucket) -> list[Tensor]:
        """Of each piece the parameter itself where the piece is all of it, else f[n] as in `parameter`."""
        return self._parts(bucket, [self.params[slot] for slot in bucket.slots])

    def gradients(self, bucket: Bucket) -> list[Tensor | None]:
        """Likewise of gradients; None where there is none."""
        return self._parts(bucket, [self.params[slot].grad for slot in bucket.slots])

    def momenta(self, bucket: Bucket) -> list[Tensor]:
        """Likewise of momenta."""
        return self._parts(bucket, [self._kept[slot]["exp_avg"] for slot in bucket.slots])

    def _parts(self, bucket: Bucket, tensors: list[AnyTensor]) -> list[AnyTensor]:
        if self._sharded:
            tensors = [tensor if tensor is None else local(tensor) for tensor in tensors]
        for k in bucket.cut:
            tensor, piece = tensors[k], bucket.pieces[k]
            if tensor is not None:
                tensors[k] = tensor.reshape(-1)[piece.start : piece.stop]
        return tensors

    def write(self, piece: Piece, values: Tensor) -> None:
        """Make `values`, f[n], the elements of the piece; nothing to do where they are a view of it."""
        param = local(self.params[piece.slot]).detach()
        if param.is_contiguous():
            if values.data_ptr() != param.view(-1)[piece.start : piece.stop].data_ptr():
                param.view(-1)[piece.start : piece.stop].copy_(values)
            return
        flat = param.reshape(-1)
        flat[piece.start : piece.stop] = values
        param.copy_(flat.view(param.shape))

    def allocate_momentum(self, dtype_of: Callable[[Tensor], torch.dtype]) -> None:
        """Give every trainable parameter that has none its `exp_avg`, zero, of `dtype_of(parameter)`."""
        for param in self.params:
            if "exp_avg" not in self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(
                    param, dtype=dtype_of(param), memory_format=torch.contiguous_format, requires_grad=False
                )
