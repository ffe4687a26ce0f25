"""What every implementation of an operator refuses, in the same words."""

from collections.abc import Sequence


def ballot_planes(zeros: str) -> int:
    """The planes of a ballot: 1 for "balanced", 2 for "exact"."""
    if zeros not in ("balanced", "exact"):
        raise ValueError(f"zeros={zeros!r} is not a way to vote on zeros: choose balanced or exact")
    return 1 if zeros == "balanced" else 2


def check_rounding(rounding: str) -> None:
    """Raises ValueError unless it is "nearest" or "stochastic"."""
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding={rounding!r} is not a way to round: choose nearest or stochastic")


def check_tables(tables: Sequence[float], decays: Sequence[float], planes: int) -> None:
    """Raises ValueError unless there are 2**planes steps for each group."""
    if len(tables) != len(decays) * 2**planes:
        raise ValueError(f"{len(tables)} steps are not 2**{planes} for each of {len(decays)} groups")


def check_pieces(offsets: Sequence[int], numels: Sequence[int], size: int) -> None:
    """Raises ValueError unless every piece starts on a word and ends inside the bucket."""
    for offset, numel in zip(offsets, numels, strict=True):
        if offset % 64 or offset < 0 or offset + -(-numel // 64) * 64 > size:
            raise ValueError(
                f"a piece of {numel} elements at element {offset} is not on a word inside a bucket of {size} elements"
            )
