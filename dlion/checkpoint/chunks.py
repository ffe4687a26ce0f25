"""What of a tensor lies in a process: all of it, or the block of a sharded one (a DTensor)."""

from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from dlion.layout import local
from dlion.sharding import offset_of


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor.

    Attributes:
        values: T[shape].
        offset: where its first element lies in the whole tensor.
        size: the shape of the whole tensor.
    """

    values: Tensor
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Chunk":
        """What of a tensor is here; nothing is copied.

        Raises:
            RuntimeError: torch's own, of a DTensor that waits for a sum over ranks.
        """
        values, size = local(tensor).detach(), tuple(tensor.shape)
        return Chunk(values, offset_of(tensor), size)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def says_nothing(self) -> bool:
        """Whether others hold all elements of the tensor."""
        return prod(self.size) > 0 and self.values.numel() == 0

    def row(self, number: int, count: int) -> "Chunk":
        """The same block of row `number` where `count` such tensors are stacked."""
        return Chunk(self.values.unsqueeze(0), (number, *self.offset), (count, *self.size))

    def on_cpu(self, copied: bool) -> "Chunk":
        """The same on the CPU, contiguous, and in memory of its own if it is to be `copied`."""
        return replace(self, values=self.values.to("cpu", copy=copied).contiguous())
