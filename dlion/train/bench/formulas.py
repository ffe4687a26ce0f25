"""Bytes that each worker sends in a step, by formula; it receives as many."""

from math import ceil, log2


def ring(payload: float, workers: int) -> float:
    """A ring all-reduce of `payload` bytes."""
    return 2 * (workers - 1) / workers * payload


def votes(parameters: int, workers: int, vote: str) -> float:
    """A vote on `parameters`, without headers and padding: dlion's topology "auto" takes "replicated" for two."""
    if workers == 2:
        return parameters / 8
    planes = 1 if vote == "majority" else ceil(log2(workers + 1))
    return (workers - 1) / (8 * workers) * (1 + planes) * parameters


def ddp_calls(parameters: int, bucket_cap_mb: float) -> int:
    """All-reduces of float32 gradients, about: a tensor is never cut."""
    return ceil(4 * parameters / (bucket_cap_mb * 2**20))
