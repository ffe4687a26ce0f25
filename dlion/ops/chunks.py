"""What one launch reads of a list of tensors: a table in device memory that cuts the pieces of a bucket into chunks.

Tables are kept: the cut as long as the layout is the same, addresses as long as the tensors stay where they are. So a
step sends nothing to the device but what changed, and never waits for it: what is sent lies in pinned memory. All that
is kept belongs to the stream it was sent on, for another stream would not wait for it.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dlion.ops.arguments import NO_HYPER_PARAMETERS, check_lengths, check_pieces

LAYOUTS = 4096  # kept at once: one for each bucket, verb and pair of dtypes


def stream_of(device: torch.device) -> int:
    """The device's stream that work goes to now; 0 where there are none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """T[n] in device memory, each number rounded once."""
    host = torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else dtype, device="cpu").to(dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@lru_cache(maxsize=64)
def floats(values: tuple[float, ...], device: torch.device, stream: int) -> Tensor:
    """f32[n]: hyper-parameters, which few steps change."""
    return sent(values, torch.float32, device)


def hypers_of(values: tuple[float, ...] | Tensor, device: torch.device, stream: int) -> Tensor:
    """f32[n]: hyper-parameters that the host knows, or that lie on the device already."""
    return values if isinstance(values, Tensor) else floats(values, device, stream)


def clock_of(t: int | Tensor, device: torch.device, stream: int) -> Tensor:
    """i64[1]: t, which the host knows or which lies on the device already."""
    return t.view(1) if isinstance(t, Tensor) else clock(t, device, stream)


@lru_cache(maxsize=8)
def clock(t: int, device: torch.device, stream: int) -> Tensor:
    """i64[1]: t where kernels read it."""
    return torch.full((1,), t, dtype=torch.int64, device=device)


class Chunks:
    """Pieces of a bucket, cut into chunks.

    Args:
        numels, offsets, groups: of the pieces, as in `reference.ballot`.
        chunk: elements of a whole chunk, in whole words.

    Attributes:
        count: of chunks. owners: i32[count], the piece of each.
        pieces: i64[pieces, 4]: elements, first word in the bucket, group, first chunk.
    """

    def __init__(
        self, numels: Sequence[int], offsets: Sequence[int], groups: Sequence[int], chunk: int, device: torch.device
    ) -> None:
        self._device = device
        self._addresses: list[int] = []
        self._sent: Tensor | None = None
        owners: list[int] = []
        rows: list[int] = []
        for piece, (numel, offset, group) in enumerate(zip(numels, offsets, groups, strict=True)):
            rows += (numel, offset // 64, group, len(owners))
            owners += [piece] * -(-numel // chunk)
        self.count = len(owners)
        self.owners = sent(owners, torch.int32, device)
        self.pieces = sent(rows, torch.int64, device)

    def addresses(self, now: list[int]) -> Tensor:
        """i64[n]: the addresses of the pieces' tensors, sent again where one has moved."""
        if self._sent is None or now != self._addresses:
            self._addresses, self._sent = now, sent(now, torch.int64, self._device)
        return self._sent


@lru_cache(maxsize=LAYOUTS)
def chunks(
    verb: str,
    numels: tuple[int, ...],
    offsets: tuple[int, ...],
    groups: tuple[int, ...],
    size: int,
    hypers: int,
    chunk: int,
    device: torch.device,
    stream: int,
) -> Chunks:
    """The table of a layout; one for each verb, for each has its own tensors.

    Raises:
        ValueError: a piece lies outside the bucket or not on a word, or its group is none of `hypers`.
    """
    check_lengths(numels, offsets, groups)
    check_pieces(offsets, numels, size)
    if not all(0 <= group < hypers for group in groups):
        raise ValueError(NO_HYPER_PARAMETERS)
    return Chunks(numels, offsets, groups, chunk, device)
