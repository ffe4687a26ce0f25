"""What a model is to the wire: the shapes of its trainable tensors."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, isqrt, prod

Shape = tuple[int, ...]
TYPICAL = 2**20  # elements of a tensor where only their sum is known


@dataclass(frozen=True)
class Sizes:
    """Shapes, and how many tensors have each."""

    name: str
    shapes: tuple[tuple[Shape, int], ...]

    @staticmethod
    def of(name: str, shapes: Iterable[Shape]) -> "Sizes":
        """From every tensor's shape."""
        return Sizes(name, tuple(Counter(map(tuple, shapes)).items()))

    @staticmethod
    def assumed(parameters: int, tensors: int | None) -> "Sizes":
        """So many parameters in so many equal, square matrices; what is left over is a vector.

        Args:
            tensors: None takes one for each 2**20 parameters.
        """
        count = tensors or max(1, round(parameters / TYPICAL))
        each = parameters // count
        side = isqrt(each)
        matrix = (side, each // side)
        left = parameters - count * prod(matrix)
        return Sizes(f"{parameters:,} parameters", ((matrix, count), *([((left,), 1)] if left else [])))

    @cached_property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(prod(shape) * count for shape, count in self.shapes)

    @cached_property
    def tensors(self) -> int:
        """How many there are."""
        return sum(count for _, count in self.shapes)

    def aligned(self, align: int) -> int:
        """Elements when every tensor starts on a multiple of `align`."""
        return sum(align * ceil(prod(shape) / align) * count for shape, count in self.shapes)

    def kept(self, share: float) -> int:
        """Entries, if of each tensor this share is kept, rounded up."""
        return sum(ceil(share * prod(shape)) * count for shape, count in self.shapes)

    def factors(self, rank: int) -> tuple[int, int, int]:
        """PowerSGD: numbers in the factors P, in the factors Q, and in tensors that are not worth them (less than 2 to
        1, as torch's hook decides).
        """
        left = right = whole = 0
        for shape, count in self.shapes:
            rows = shape[0] if len(shape) > 1 else 1
            columns = prod(shape) // max(rows, 1)
            if (rows + columns) * rank * 2 < rows * columns:
                left += rows * rank * count
                right += columns * rank * count
            else:
                whole += rows * columns * count
        return left, right, whole
