"""Warnings that name the line of the user's own that called dlion."""

import sys
import warnings

OURS = ("dlion", "torch")  # torch wraps `step()`, and so do hooks of its own


def warn_caller(text: str) -> None:
    """Warn of `text` where the first function that is neither dlion's nor torch's calls one of theirs."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
