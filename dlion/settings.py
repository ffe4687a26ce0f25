"""The hyper-parameters that only some methods have: which there are, and what they may be."""

import sys
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

from dlion.quoting import shown

MOST_BUCKET_BYTES = 2**40  # nobody has so many parameters: one bucket holds all
LARGEST = 10**9  # of anything that is counted: more is a slip of the pen, and not every library holds much more


def number(value: Any, least: float, below: float) -> bool:
    """Whether `least <= value < below`; True and False are no numbers here, nor is what no float can hold."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and abs(value) <= sys.float_info.max and least <= float(value) < below


def whole(value: Any, least: int, most: int = LARGEST) -> bool:
    """Whether `value` is an integer from `least` to `most`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


# name -> (whether a value is allowed, what is allowed)
SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "momentum": (lambda value: number(value, 0, 1), "a number, at least 0 and below 1"),
    "keep": (lambda value: number(value, 0, 1.0000001) and value > 0, "a number above 0 and at most 1"),
    "threshold": (lambda value: value in ("global", "tensor"), "'global' or 'tensor'"),
    "clip": (lambda value: number(value, 0, float("inf")), "a finite number, 0 (no clipping) or greater"),
    "warmup": (lambda value: whole(value, 0), f"a whole number of steps, 0 to {LARGEST:,}"),
    "rank": (lambda value: whole(value, 1), f"a whole number, 1 to {LARGEST:,}"),
    "seed": (lambda value: whole(value, 0, 2**63 - 1), "a whole number, 0 to 2^63 - 1"),
    "eps": (lambda value: number(value, 0, float("inf")), "a finite number, 0 or greater"),
    "amsgrad": (lambda value: isinstance(value, bool), "True or False"),
}


def settings_of(defaults: Iterable[str]) -> list[str]:
    """The names among a method's defaults that are settings, and no arguments of the optimizer."""
    return [name for name in defaults if name in SETTINGS]


def check_settings(method: str, defaults: Iterable[str], given: dict[str, Any]) -> None:
    """Raise a ValueError for a setting that the method does not have, or that is out of range."""
    known = settings_of(defaults)
    for name, value in given.items():
        if name not in known:
            has = f"its settings are {', '.join(known)}" if known else "which has no settings"
            raise ValueError(f"{name}={value!r} is no setting of method={method!r}, {has}: leave it out")
    check_values(given)


def check_values(group: dict[str, Any]) -> None:
    """Raise a ValueError for the first setting in `group` that is out of range."""
    for name, (allowed, text) in SETTINGS.items():
        if name in group and not allowed(group[name]):
            raise ValueError(f"{name}={shown(group[name])} must be {text}")
