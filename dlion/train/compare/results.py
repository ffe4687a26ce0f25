"""From recorded cells to results: means and spreads at each variant's best setting, and the whole grid."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dlion.train.compare.cells import Cell, first_stage, place_words, second_stage, tuned_at
from dlion.train.compare.choose import Choice, choose, higher_is_better, metric_of, value_of
from dlion.train.compare.study import METRICS, Study

Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """The seeds of one variant at one place and setting, those that are recorded and those that are not.

    records: one for each seed; None where that cell is not recorded.
    """

    variant: str
    place: dict[str, Any]
    setting: dict[str, Any]
    seeds: tuple[Any, ...]
    records: tuple[Record | None, ...]
    edges: tuple[str, ...] = ()

    @property
    def found(self) -> list[Record]:
        """What is recorded."""
        return [record for record in self.records if record is not None]

    @property
    def diverged(self) -> int:
        """How many of the seeds diverged."""
        return sum(record["diverged"] for record in self.found)

    def values(self, metric: str) -> list[float]:
        """The metric of each seed that has one."""
        values = [value_of(record, metric) for record in self.found]
        return [value for value in values if not math.isnan(value)]

    def mean(self, metric: str) -> float:
        """Over the seeds that did not diverge; NaN where there is none."""
        values = self.values(metric)
        return statistics.fmean(values) if values else math.nan

    def spread(self, metric: str) -> float:
        """The sample standard deviation over the seeds that did not diverge; NaN for one."""
        values = self.values(metric)
        return statistics.stdev(values) if len(values) > 1 else math.nan

    def average(self, key: str) -> float:
        """The mean of a number over all seeds; NaN where one has none."""
        values = [float(math.nan if record.get(key) is None else record[key]) for record in self.found]
        return statistics.fmean(values) if values else math.nan


@dataclass(frozen=True)
class Results:
    """What a study has shown so far."""

    study: Study
    records: Mapping[str, Record]

    @cached_property
    def chosen(self) -> dict[tuple[str, str], Choice]:
        """The best settings, where they are known."""
        return choose(self.study, self.records)

    @cached_property
    def rows(self) -> list[Row]:
        """Every variant at its best setting, place by place."""
        points = {key: choice.point for key, choice in self.chosen.items()}
        rows = _rows(second_stage(self.study, points), self.records)
        edges = {key: choice.edges for key, choice in self.chosen.items()}
        places = [
            (variant, {axis: value.label for axis, value in place.items()}, place_words(tuned_at(self.study, place)))
            for variant in self.study.variants
            for place in self.study.places(variant)
        ]
        known = {(variant, str(place)): edges.get((variant, words), ()) for variant, place, words in places}
        rows = [_with_edges(row, known[row.variant, str(row.place)]) for row in rows]
        order = list(dict.fromkeys(str(row.place) for row in rows))
        return sorted(rows, key=lambda row: order.index(str(row.place)))

    @cached_property
    def grid(self) -> list[Row]:
        """Every setting that was searched."""
        return _rows(first_stage(self.study), self.records)

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics that tables show, the one that counts first: it, its like (best or last), and the best loss."""
        first = metric_of(self.study)
        like = first.removeprefix("best_") if first.startswith("best_") else f"best_{first}"
        has = {name for name in METRICS if any(record.get(name) is not None for record in self.records.values())}
        others = [name for name in dict.fromkeys([like, "best_val_loss"]) if name in has and name != first]
        return [first, *others]

    def places(self) -> list[dict[str, Any]]:
        """The places that have a row, in order."""
        return list({str(row.place): row.place for row in self.rows}.values())

    def difference(self, row: Row) -> tuple[float, float] | None:
        """How far a row's mean lies from that of the first variant at its place, and the standard deviation of the
        difference of two single runs; None for the first itself, and where either has no mean.
        """
        metric = metric_of(self.study)
        first = next(iter(self.study.variants))
        others = [one for one in self.rows if one.place == row.place and one.variant == first]
        if row.variant == first or not others:
            return None
        difference = row.mean(metric) - others[0].mean(metric)
        return (
            None if math.isnan(difference) else (difference, math.hypot(row.spread(metric), others[0].spread(metric)))
        )

    @property
    def higher_is_better(self) -> bool:
        """Whether the metric that counts is to be large."""
        return higher_is_better(metric_of(self.study))


def _with_edges(row: Row, edges: tuple[str, ...]) -> Row:
    return Row(row.variant, row.place, row.setting, row.seeds, row.records, edges)


def _rows(cells: Sequence[Cell], records: Mapping[str, Record]) -> list[Row]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(f"{cell.variant} {cell.place} {cell.setting}", []).append(cell)
    return [
        Row(
            group[0].variant,
            group[0].place,
            group[0].setting,
            tuple(cell.seed for cell in group),
            tuple(records.get(cell.key) for cell in group),
        )
        for group in groups.values()
    ]
