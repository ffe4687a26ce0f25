"""The bandwidth below which a method is quicker than another."""

from collections.abc import Callable
from typing import Any

LOWEST, HIGHEST, POINTS = 1e5, 1e13, 161  # bytes per second: 0.8 Mbit/s to 80 Tbit/s, twenty points a decade
GRID = [LOWEST * (HIGHEST / LOWEST) ** (k / (POINTS - 1)) for k in range(POINTS)]
HALVINGS = 40
SAME = 1e-12  # seconds


def break_even(ahead: Callable[[float], float]) -> dict[str, Any]:
    """The highest bandwidth below which a method is always ahead.

    Args:
        ahead: seconds by which it is ahead at a bandwidth in bytes per second.

    Returns:
        `pays`: "everywhere", "below" or "nowhere"; `mbit_per_s`: where it pays "below", else None. Nowhere: it is not
        ahead on the slowest link; it may still be where latency counts.
    """
    low = None
    for rate in GRID:
        if ahead(rate) <= SAME:
            break
        low = rate
    else:
        return {"pays": "everywhere", "mbit_per_s": None}
    if low is None:
        return {"pays": "nowhere", "mbit_per_s": None}
    high = rate
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if ahead(middle) > SAME else (low, middle)
    return {"pays": "below", "mbit_per_s": 8e-6 * low}
