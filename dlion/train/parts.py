"""How a sorted training set is cut among workers that do not draw from all of it."""


def part(total: int, rank: int, workers: int) -> tuple[int, int]:
    """First and end of a worker's part of `total` samples in a row."""
    return rank * total // workers, (rank + 1) * total // workers
