"""What one launch reads of a list of tensors: a table in device memory that cuts the pieces of a bucket into chunks.

Tables are kept: the cut as long as the layout is the same, addresses as long as the tensors stay where they are. So a
step sends nothing to the device but what changed, and never waits for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dlion.ops.arguments import NO_HYPER_PARAMETERS, check_lengths, check_pieces
from dlion.ops.kept import Kept, Shelf, is_captured, sent


class Chunks:
    """Pieces of a bucket, cut into chunks.

    Args:
        numels, offsets, groups: of the pieces, as in `reference.ballot`.
        chunk: elements of a whole chunk, in whole words.

    Attributes:
        count: of chunks.
    """

    def __init__(
        self, numels: Sequence[int], offsets: Sequence[int], groups: Sequence[int], chunk: int, device: torch.device
    ) -> None:
        self.device = device
        self._addresses: list[int] = []
        self._sent: Kept | None = None
        self.count = 0
        counts: list[int] = []
        rows: list[int] = []
        for numel, offset, group in zip(numels, offsets, groups, strict=True):
            rows += (numel, offset // 64, group, self.count)
            counts.append(-(-numel // chunk))
            self.count += counts[-1]
        each = torch.arange(len(counts), dtype=torch.int32, device=device)
        owners = each.repeat_interleave(sent(counts, torch.int64, device), output_size=self.count)
        self._cut = Kept(device, owners, sent(rows, torch.int64, device))

    def here(self) -> tuple[Tensor, ...]:
        """For the current stream: the piece of each chunk, i32[count]; and of each piece its number of elements, its
        first word in the bucket, its group and its first chunk, i64[4*pieces].
        """
        return self._cut.here()

    def addresses(self, now: list[int]) -> Tensor:
        """i64[n]: the addresses of the pieces' tensors, sent again where one has moved."""
        kept = self._sent
        if kept is None or now != self._addresses:
            kept = Kept(self.device, sent(now, torch.int64, self.device))
            if not is_captured(self.device):
                self._addresses, self._sent = now, kept
        return kept.here()[0]


_chunks: Shelf[Chunks] = Shelf(2**16)  # one for each bucket, verb and pair of dtypes
_hypers: Shelf[Kept] = Shelf(64)
_clocks: Shelf[Kept] = Shelf(8)
_awake: Shelf[Kept] = Shelf(64)  # one for each device
_rosters: Shelf[Kept] = Shelf(64)


def chunks(
    verb: str,
    numels: tuple[int, ...],
    offsets: tuple[int, ...],
    groups: tuple[int, ...],
    size: int,
    hypers: int,
    chunk: int,
    device: torch.device,
) -> Chunks:
    """The table of a layout; one for each verb, for each has its own tensors.

    Raises:
        ValueError: a piece lies outside the bucket or not on a word, or its group is none of `hypers`.
    """

    def made() -> Chunks:
        check_lengths(numels, offsets, groups)
        check_pieces(offsets, numels, size)
        if not all(0 <= group < hypers for group in groups):
            raise ValueError(NO_HYPER_PARAMETERS)
        return Chunks(numels, offsets, groups, chunk, device)

    return _chunks.get((verb, numels, offsets, groups, size, hypers, chunk, device), device, made)


def hypers_of(values: tuple[float, ...] | Tensor, device: torch.device) -> Tensor:
    """f32[n]: hyper-parameters that the host knows, and few steps change, or that lie on the device already."""
    if isinstance(values, Tensor):
        return values
    return _hypers.get((values, device), device, lambda: Kept(device, sent(values, torch.float32, device))).here()[0]


def clock_of(t: int | Tensor, device: torch.device) -> Tensor:
    """i64[1]: t, which the host knows or which lies on the device already."""
    if isinstance(t, Tensor):
        return t.view(1)
    made = lambda: Kept(device, torch.full((1,), t, dtype=torch.int64, device=device))  # noqa: E731
    return _clocks.get((t, device), device, made).here()[0]


def awake_of(awake: Tensor | None, device: torch.device) -> Tensor:
    """bool[1]: whether momenta may move, where that lies on the device already; None: they may."""
    if awake is not None:
        return awake.view(1)
    made = lambda: Kept(device, torch.ones(1, dtype=torch.bool, device=device))  # noqa: E731
    return _awake.get(device, device, made).here()[0]


def roster_of_all(rows: int, device: torch.device) -> Tensor:
    """i64[1 + rows]: the roster where the ballots in all rows count."""
    made = lambda: Kept(device, sent((rows, *range(rows)), torch.int64, device))  # noqa: E731
    return _rosters.get((rows, device), device, made).here()[0]


def forget() -> None:
    """Keep nothing of what was sent so far."""
    for shelf in (_chunks, _hypers, _clocks, _awake, _rosters):
        shelf.clear()
