"""What every implementation of an operator refuses, in the same words."""

from collections.abc import Sequence

MOST_VOTERS = 2**20 - 1  # that the planes of compiled counts hold
NO_HYPER_PARAMETERS = "a piece belongs to a group that has no hyper-parameters"


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


def check_lengths(numels: Sequence[int], offsets: Sequence[int], groups: Sequence[int]) -> None:
    """Raises ValueError unless every piece has an offset and a group."""
    if not len(numels) == len(offsets) == len(groups):
        raise ValueError(f"{len(numels)} pieces came with {len(offsets)} offsets and {len(groups)} groups")


def check_voters(voters: int) -> None:
    """Raises ValueError unless there are ballots to count, and no more than compiled kernels can."""
    if not 0 < voters <= MOST_VOTERS:
        raise ValueError(f"a tally of {voters} ballots is not defined: give 1 to {MOST_VOTERS}")
