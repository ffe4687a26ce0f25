"""Axes of a study: what varies, value by value. Nothing here imports torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from dlion.train.legal import shown

Flags = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """One value of an axis: what it is called, and the flags it sets (several where the file has a table)."""

    label: Any
    flags: Flags

    @classmethod
    def of(cls, axis: str, told: Any) -> "Value":
        """From the file: a plain value of the flag `axis`, or a table of flags with a `label`."""
        if isinstance(told, Mapping):
            if "label" not in told or len(told) < 2:
                raise ValueError(
                    f"a table of the axis {axis!r} needs a label and at least one flag, not {shown(dict(told))}."
                )
            for key, one in told.items():
                check_plain(key, one)
            return cls(told["label"], {flag: value for flag, value in told.items() if flag != "label"})
        check_plain(axis, told)
        return cls(told, {axis: told})

    def told(self, axis: str) -> Any:
        """The inverse of `of`."""
        return self.label if self.flags == {axis: self.label} else {"label": self.label, **self.flags}


Axes = dict[str, tuple[Value, ...]]


def check_plain(name: str, value: Any) -> None:
    """Refuse what no flag can be, such as a date, which TOML knows and JSON does not.

    Raises:
        ValueError: it is neither a number, a word, yes or no, nor a list of them.
    """
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, (str, int, float)):
            raise ValueError(
                f"{shown(name)} cannot be {shown(repr(value))}: give a number, a word, true or false, or a list of "
                "them."
            )


def read_axes(told: Mapping[str, Any], where: str) -> tuple[Axes, dict[str, Axes]]:
    """The lists of a table, and the lists of the tables in it, which belong to one variant each."""
    axes: Axes = {}
    own: dict[str, Axes] = {}
    for name, values in told.items():
        if isinstance(values, Mapping):
            own[name], deeper = read_axes(values, f"{where}.{name}")
            if deeper:
                raise ValueError(f"[{where}.{name}] holds a table {min(deeper)}: lists of values are expected")
        elif isinstance(values, list):
            axes[name] = tuple(Value.of(name, value) for value in values)
        else:
            raise ValueError(f"{shown(name)} in [{where}] is {shown(repr(values))}: a list of values is expected")
    return axes, own


def told_axes(axes: Axes, own: dict[str, Axes]) -> dict[str, Any]:
    """The inverse of `read_axes`."""
    told: dict[str, Any] = {axis: [value.told(axis) for value in values] for axis, values in axes.items()}
    return told | {name: told_axes(inner, {}) for name, inner in own.items()}


def combined(axes: Axes) -> Iterator[dict[str, Value]]:
    """Every combination of one value of each axis."""
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))
