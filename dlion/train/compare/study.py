"""What is compared with what: a study, and the TOML file that holds it. Nothing here imports torch.

A study varies flags of `dlion train`. One axis is compared (the method, unless the study says otherwise), the seed is
averaged over, a grid is searched for each variant's best setting, and every other axis makes a place: a condition under
which the variants meet.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import tomli_w

from dlion.train.compare.axes import Axes, Flags, Value, check_plain, combined, read_axes, told_axes
from dlion.train.config import read_toml, unknown_name
from dlion.train.legal import shown

METRICS = ("val_accuracy", "best_val_accuracy", "val_loss", "best_val_loss")
SEED = "seed"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study; each field is a key of its file (docs/compare.md shows one).

    Raises:
        ValueError: the parts contradict each other, in one sentence.
    """

    train: Flags
    """Flags of all cells."""
    vary: Axes
    """Axes and their values; the compared one and the seed are among them."""
    vary_of: dict[str, Axes] = field(default_factory=dict)
    """Axes that one variant has instead."""
    grid: Axes = field(default_factory=dict)
    """Flags that are searched for the best setting."""
    grid_of: dict[str, Axes] = field(default_factory=dict)
    """Values of the grid that one variant has instead, or in addition."""
    tune: dict[str, Value] | None = None
    """Where the grid is searched: one value of each axis named. None: everywhere, with every seed."""
    metric: str | None = None
    """What the best setting is best at: one of METRICS."""
    compare: str = "method"
    """The axis whose values are compared: the variants."""
    simulate: bool = False
    """Workers are simulated in one process."""
    title: str = ""
    """For readers."""
    notes: tuple[str, ...] = ()
    """Sentences for readers: what was shrunk, what is peculiar."""

    def __post_init__(self) -> None:
        if self.metric is not None and self.metric not in METRICS:
            raise unknown_name("metric", self.metric, list(METRICS))
        for axis in (self.compare, SEED):
            if not self.vary.get(axis):
                raise ValueError(f"nothing is said about {shown(axis)}: give [vary] at least one {shown(axis)}.")
        for axis, values in [pair for axes in self._all_axes for pair in axes.items()]:
            labels = [str(value.label) for value in values]
            if not labels or len(set(labels)) < len(labels):
                raise ValueError(
                    f"the axis {shown(repr(axis))} must have one value or more, each only once, not {shown(labels)}."
                )
            if same := next((two for two in combinations(values, 2) if two[0].flags == two[1].flags), None):
                names = " and ".join(str(value.label) for value in same)
                raise ValueError(f"{shown(names)} of the axis {axis!r} set the same flags: leave one out.")
        for name in [*self.vary_of, *self.grid_of]:
            if name not in self.variants:
                raise unknown_name(f"{self.compare} in [vary.{name}] or [grid.{name}]", name, list(self.variants))
        if clash := (self.vary.keys() & self.grid.keys()):
            raise ValueError(f"{min(clash)} is both in [vary] and in [grid]: it is either a condition or searched.")
        varied = {flag for axes in self._all_axes for values in axes.values() for one in values for flag in one.flags}
        if clash := (varied & self.train.keys()):
            raise ValueError(f"{min(clash)} is the same for all in [train] and varies elsewhere: it is either.")
        if "simulate" in varied | self.train.keys():
            raise ValueError(
                "simulate is no flag of single runs: say it of the whole study, and give numbers of workers."
            )
        self._check_own()
        self._check_tune()

    def _check_own(self) -> None:
        """What one variant has instead must be something that the others have, and no flag may be set twice."""
        for name, axes in self.vary_of.items():
            for axis in axes:
                if axis not in self.vary or axis == self.compare:
                    known = [one for one in self.vary if one != self.compare]
                    raise unknown_name(f"axis in [vary.{name}]", axis, known)
        for variant, value in self.variants.items():
            varied = {axis: self.values(variant, axis) for axis in self.vary} | {self.compare: (value,)}
            owners: dict[str, str] = {}
            for where, axes in (("vary", varied), ("grid", self.searched(variant))):
                for axis, values in axes.items():
                    for flag in {flag for one in values for flag in one.flags}:
                        if flag in owners:
                            raise ValueError(
                                f"{flag} of {variant} is set by {axis} in [{where}] and {owners[flag]}: choose one."
                            )
                        owners[flag] = f"{axis} in [{where}]"

    @property
    def _all_axes(self) -> list[Axes]:
        return [self.vary, self.grid, *self.vary_of.values(), *self.grid_of.values()]

    def _check_tune(self) -> None:
        if self.tune is None:
            return
        if SEED not in self.tune:
            raise ValueError("[tune] must name the seed with which the grid is searched, such as seed = 1.")
        for axis in self.tune:
            if axis not in self.vary or axis == self.compare:
                raise unknown_name("axis in [tune]", axis, [one for one in self.vary if one != self.compare])

    @property
    def variants(self) -> dict[str, Value]:
        """What is compared, by its label."""
        return {str(value.label): value for value in self.vary[self.compare]}

    @property
    def axes(self) -> list[str]:
        """The axes that make a place."""
        return [axis for axis in self.vary if axis not in (self.compare, SEED)]

    def values(self, variant: str, axis: str) -> tuple[Value, ...]:
        """The values of an axis (the seed included) for one variant."""
        return self.vary_of.get(variant, {}).get(axis, self.vary[axis])

    def places(self, variant: str) -> Iterator[dict[str, Value]]:
        """The conditions under which a variant is run: one value of each axis but seed and grid."""
        return combined({axis: self.values(variant, axis) for axis in self.axes})

    def points(self, variant: str) -> Iterator[dict[str, Value]]:
        """The settings that are searched for a variant; one empty setting where it has no grid."""
        return combined(self.searched(variant))

    def searched(self, variant: str) -> Axes:
        """The grid of a variant."""
        return self.grid | self.grid_of.get(variant, {})

    def anywhere(self) -> "Study":
        """The same without where the data lie, for files that others read."""
        return replace(self, train={flag: value for flag, value in self.train.items() if flag != "data"})

    def differences(self, held: "Study") -> list[str]:
        """Why cells of this study may not join those of `held`: it may have more variants, conditions, seeds and
        settings, and nothing else may differ. Where the data lie and what readers are told is not part of a study.
        """
        found = [
            f"{name} is {shown(repr(getattr(held, name)))} there and {shown(repr(getattr(self, name)))} here"
            for name in ("compare", "simulate", "metric")
            if getattr(held, name) != getattr(self, name)
        ]
        for flag in sorted((self.train.keys() | held.train.keys()) - {"data"}):
            if self.train.get(flag) != held.train.get(flag):
                there, here = held.train.get(flag, "not set"), self.train.get(flag, "not set")
                found.append(f"{flag} is {there} there and {here} here")
        mine, theirs = _said(self.tune or {}), _said(held.tune or {})
        if mine != theirs:
            found.append(f"the grid is searched at {theirs} there and at {mine} here")
        return found + _lost(self, held)


def _said(place: Mapping[str, Value]) -> dict[str, Any]:
    return {axis: value.told(axis) for axis, value in place.items()}


def _lost(study: Study, held: Study) -> list[str]:
    """What the held study has and the new one lacks."""
    for which in ("vary", "grid"):
        mine, theirs = getattr(study, which).keys(), getattr(held, which).keys()
        if mine != theirs:
            here, there = (", ".join(axes) or "nothing" for axes in (mine, theirs))
            return [f"[{which}] has {there} there and {here} here"]
    found = []
    for variant, value in held.variants.items():
        if study.variants.get(variant) != value:
            found.append(f"{study.compare} {variant} is there and not here, or sets other flags")
            continue
        for axis in (SEED, *study.axes, *study.searched(variant)):
            values = study.values(variant, axis) if axis in study.vary else study.searched(variant).get(axis, ())
            before = held.values(variant, axis) if axis in held.vary else held.searched(variant).get(axis, ())
            found += [
                f"{axis} {value.label} of {variant} is there and not here" for value in before if value not in values
            ]
    return found


def read_study(path: Path) -> Study:
    """The study in a file.

    Raises:
        ValueError: there is none, or it is not one.
    """
    told = read_toml(path)
    try:
        return study_from(told)
    except ValueError as error:
        raise ValueError(f"{path} does not describe a study: {str(error).rstrip('.')}.") from None


def study_from(told: Mapping[str, Any]) -> Study:
    """A study from what its file says."""
    known = ("title", "notes", "compare", "simulate", "metric", "train", "vary", "grid", "tune")
    for key, value in told.items():
        if key not in known:
            raise unknown_name("key", key, list(known))
        kind: type = {"notes": list, "simulate": bool}.get(key, Mapping if key in known[5:] else str)
        if not isinstance(value, kind):
            raise ValueError(f"{key} cannot be {shown(repr(value))}")
    for flag, value in told.get("train", {}).items():
        check_plain(flag, value)
    vary, vary_of = read_axes(told.get("vary", {}), "vary")
    grid, grid_of = read_axes(told.get("grid", {}), "grid")
    tune = told.get("tune")
    return Study(
        train=dict(told.get("train", {})),
        vary=vary,
        vary_of=vary_of,
        grid=grid,
        grid_of=grid_of,
        tune=None if tune is None else {axis: _pinned(vary, axis, value) for axis, value in tune.items()},
        metric=told.get("metric"),
        compare=told.get("compare", "method"),
        simulate=told.get("simulate", False),
        title=told.get("title", ""),
        notes=tuple(told.get("notes", ())),
    )


def _pinned(vary: Axes, axis: str, told: Any) -> Value:
    """A value in [tune]: the label of one that the axis has, or a new one."""
    for value in vary.get(axis, ()):
        if value.label == told and type(value.label) is type(told):
            return value
    if any(value.flags.keys() != {axis} for value in vary.get(axis, ())) and not isinstance(told, Mapping):
        labels = [str(value.label) for value in vary[axis]]
        raise unknown_name(f"{axis} in [tune]", str(told), labels)
    return Value.of(axis, told)


def toml_of(study: Study) -> str:
    """The study's file."""
    return tomli_w.dumps(told_by(study))


def told_by(study: Study) -> Flags:
    """The inverse of `study_from`."""
    told: dict[str, Any] = {
        "title": study.title,
        "notes": list(study.notes),
        "compare": study.compare,
        "simulate": study.simulate,
        "metric": study.metric,
        "train": study.train,
        "vary": told_axes(study.vary, study.vary_of),
        "grid": told_axes(study.grid, study.grid_of),
        "tune": None if study.tune is None else {axis: value.told(axis) for axis, value in study.tune.items()},
    }
    return {key: value for key, value in told.items() if value not in (None, "", [])}
