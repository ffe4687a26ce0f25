"""Each variant's best setting, by a rule that is written down before a cell has run."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlion.train.compare.axes import Value
from dlion.train.compare.cells import Cell, first_stage, place_words, said, tuned_places
from dlion.train.compare.study import SEED, Study

Record = dict[str, Any]


def rule(study: Study) -> str:
    """The rule in words."""
    best = "highest" if higher_is_better(metric_of(study)) else "lowest"
    if study.tune is None:
        over = "mean over all seeds"
    else:
        pinned = ", ".join(f"{axis} {said(value.label)}" for axis, value in study.tune.items())
        over = f"value at {pinned}"
    where = f"{study.compare} and place" if study.axes else study.compare
    return (
        f"for each {where} the setting of the grid with the {best} {metric_of(study)} ({over}), of equal ones the "
        "first, and never one that diverged."
    )


def metric_of(study: Study) -> str:
    """The metric, once it is settled (command.py does)."""
    if study.metric is None:
        raise AssertionError("the study was not settled")
    return study.metric


def higher_is_better(metric: str) -> bool:
    """Whether a metric is to be large."""
    return metric.endswith("accuracy")


def value_of(record: Record, metric: str) -> float:
    """A cell's metric; NaN where it diverged or has none."""
    stored = record.get(metric)
    return math.nan if record["diverged"] or stored is None else float(stored)


@dataclass(frozen=True)
class Candidate:
    """One setting of a variant at the place where it is searched: its cells, which may not all be recorded."""

    variant: str
    at: dict[str, Value]
    point: dict[str, Value]
    cells: tuple[Cell, ...]

    def values(self, records: Mapping[str, Record], metric: str) -> list[float] | None:
        """The metric of all its cells, in the order of seeds; None as long as one is not recorded."""
        if any(cell.key not in records for cell in self.cells):
            return None
        return [value_of(records[cell.key], metric) for cell in self.cells]


def candidates(study: Study) -> dict[tuple[str, str], list[Candidate]]:
    """All settings, by variant and words of the place where they are searched."""
    cells = first_stage(study)
    found: dict[tuple[str, str], list[Candidate]] = {}
    for variant in study.variants:
        for at in study.places(variant) if study.tune is None else tuned_places(study, variant):
            for point in study.points(variant):
                place, setting = ({axis: value.label for axis, value in one.items()} for one in (at, point))
                own = [c for c in cells if (c.variant, c.place, c.setting) == (variant, place, setting)]
                found.setdefault((variant, place_words(at)), []).append(Candidate(variant, at, point, tuple(own)))
    return found


@dataclass(frozen=True)
class Choice:
    """The best setting of a variant at a place. edges: flags of which it is the first or last value tried."""

    variant: str
    at: str
    point: dict[str, Value]
    value: float
    edges: tuple[str, ...]


def choose(study: Study, records: Mapping[str, Record]) -> dict[tuple[str, str], Choice]:
    """The choices that can be made. A setting with one cell that is not recorded keeps its group open, unless nothing
    is searched there.
    """
    metric = metric_of(study)
    sign = 1.0 if higher_is_better(metric) else -1.0
    chosen = {}
    for key, group in candidates(study).items():
        values = [candidate.values(records, metric) for candidate in group]
        means = [-math.inf if known is None else _mean(known, sign) for known in values]
        if len(group) > 1 and (None in values or max(means) == -math.inf):
            continue
        best = means.index(max(means))
        chosen[key] = Choice(*key, group[best].point, sign * means[best], _edges(study, key[0], group[best].point))
    return chosen


def _mean(values: list[float], sign: float) -> float:
    mean = sign * statistics.fmean(values)
    return -math.inf if math.isnan(mean) else mean


def unsearched(study: Study) -> bool:
    """Whether every variant has a single setting: then there is nothing to tune."""
    return all(len(list(study.points(variant))) == 1 for variant in study.variants)


def _edges(study: Study, variant: str, point: dict[str, Value]) -> tuple[str, ...]:
    found = []
    for axis, values in study.searched(variant).items():
        labels = [value.label for value in values]
        numbers = all(isinstance(label, (int, float)) for label in labels) and len(labels) > 1
        if numbers and point[axis].label in (min(labels), max(labels)):
            found.append(axis)
    return tuple(found)


def to_json(study: Study, chosen: Mapping[tuple[str, str], Choice]) -> Record:
    """What chosen.json holds."""
    return {
        "rule": rule(study),
        "metric": metric_of(study),
        "searched with seed": study.tune[SEED].label if study.tune else "all",
        "choices": [
            {
                study.compare: choice.variant,
                "place": choice.at,
                "setting": {axis: value.label for axis, value in choice.point.items()},
                "value": choice.value if math.isfinite(choice.value) else None,
                "at the edge of the grid": list(choice.edges),
            }
            for choice in chosen.values()
        ],
    }
