"""One worker's parameters, gradients and state, in the order of a layout."""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from dlion.layout import Bucket, Piece, local, named

AnyTensor = TypeVar("AnyTensor", Tensor, Tensor | None)


class Replica:
    """One worker's parameters, gradients and state, seen as flat slices in the order of a layout.

    Parameters and gradients stay where they are; a slice of a tensor that is not contiguous is a copy, which
    `write` puts back.

    Attributes:
        hypers: of each group the hyper-parameters, plain numbers, as they were when the step began.
        noted: what a rule keeps from the survey of a step to its ballots and verdicts.
        resting: whether this worker says nothing in this step. A rule then finds NaN in the place of every gradient,
            and lets this worker's own state rest as it does for a gradient that is not finite.
        awake: bool[], False where only the device knows that this worker rests; None where the host knows.
    """

    def __init__(self, param_groups: list[dict[str, Any]], state: Any) -> None:
        self.param_groups = param_groups
        self.state = state
        self.hypers: list[dict[str, Any]] = []
        self.noted: dict[str, Any] = {}
        self.resting = False
        self.awake: Tensor | None = None
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
        """f[n]: the local gradient; zeros where there is none, NaN in a step in which this worker rests."""
        param = self.params[piece.slot]
        if self.resting or param.grad is None:
            nothing = math.nan if self.resting else 0.0
            return local(param).detach().new_full((), nothing).expand(piece.stop - piece.start)
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

    def whole(self, slot: int) -> Piece:
        """All of a tensor as one piece."""
        return Piece(slot, 0, local(self.params[slot]).numel(), 0)

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
