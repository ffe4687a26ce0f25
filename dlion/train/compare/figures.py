"""The drawings of a study: what is reached by when, with how many workers, and for how many bits and bytes."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from dlion.train.compare.cells import said
from dlion.train.compare.looks import look
from dlion.train.compare.results import Record, Results, Row
from dlion.train.page import drawing

SIZE = (4.75, 3.3)
MARKS = 6  # on a line, about
Point = tuple[float, float]


@dataclass(frozen=True)
class Against:
    """What curves are drawn against. of: where on the axis an evaluation lies (record, its place in the curve)."""

    name: str
    label: str
    of: Callable[[Record, int], float]
    logarithmic: bool


def epochs() -> Against:
    """How often each worker has seen as many samples as the training set has."""
    return Against("epochs", "epochs of each worker", lambda r, i: r["curve"]["step"][i] / r["epoch_steps"], False)


def megabytes() -> Against:
    """What each worker has sent."""
    return Against("bytes", "MB sent by each worker", lambda r, i: r["curve"]["bytes_sent"][i] / 1e6, True)


def seconds(mbit: float, step_seconds: float) -> Against:
    """By an estimate: computing, then sending at the link's rate, one after the other; without latency."""

    def of(record: Record, index: int) -> float:
        curve = record["curve"]
        return float(curve["step"][index] * step_seconds + 8 * curve["bytes_sent"][index] / (1e6 * mbit))

    return Against("time", f"seconds, estimated for {mbit:g} Mbit/s", of, True)


def step_seconds(results: Results) -> float:
    """What a worker takes for a step: the median over all cells, so that the same counts for all methods."""
    spent = [
        record["seconds"] / record["steps"] / (record["workers"] if record["simulated"] else 1)
        for record in results.records.values()
    ]
    return statistics.median(spent) if spent else 0.0


def kind_of(results: Results) -> str:
    """What the curves show: accuracy where there is one."""
    return "accuracy" if any(record.get("val_accuracy") is not None for record in results.records.values()) else "loss"


def curves(results: Results, place: Record, against: Against, kind: str, name: str) -> str:
    """Accuracy or loss of every variant at a place, mean over the seeds that did not diverge."""
    lines = {row.variant: line(row, against, f"val_{kind}") for row in _at(results, place)}
    if not any(lines.values()):
        return ""

    def paint(axes: Axes) -> None:
        for number, variant in enumerate(results.study.variants):
            if points := lines.get(variant):
                every = max(1, len(points) // MARKS)
                axes.plot(*zip(*points, strict=True), markevery=(number % every, every), **look(number))
        axes.set_xlabel(against.label)
        axes.set_ylabel(_label(kind))
        if against.logarithmic:
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0)

    return drawing(paint, name, f"{kind} against {against.label}", SIZE)


def line(row: Row, against: Against, metric: str) -> list[Point]:
    """Points of a curve: both coordinates are means over the seeds."""
    whole = [record for record in row.found if not record["diverged"] and metric in record["curve"]]
    points = []
    for index in range(min((len(record["curve"]["step"]) for record in whole), default=0)):
        ys = [record["curve"][metric][index] for record in whole]
        x = statistics.fmean(against.of(record, index) for record in whole)
        if None not in ys and (x > 0 or not against.logarithmic):
            points.append((x, statistics.fmean(ys) * _unit(metric)))
    return points


def against_axis(results: Results, axis: str, rest: Record, name: str) -> str:
    """The best metric of every variant against the values of an axis, at one place of the other axes."""
    kind = kind_of(results)
    metric = f"best_val_{kind}"
    rows = [row for row in results.rows if {**row.place, axis: None} == {**rest, axis: None} and row.values(metric)]
    labels = list(dict.fromkeys(value.label for values in _all_values(results, axis) for value in values))
    if len({str(row.place[axis]) for row in rows}) < 2:
        return ""
    numbers = all(isinstance(label, (int, float)) and not isinstance(label, bool) for label in labels)
    labels = sorted(labels) if numbers else labels

    def paint(axes: Axes) -> None:
        for number, variant in enumerate(results.study.variants):
            own = sorted((row for row in rows if row.variant == variant), key=lambda row: labels.index(row.place[axis]))
            if own:
                _bars(axes, [labels.index(row.place[axis]) for row in own], own, metric, number, results)
        slanted: Any = {} if numbers else {"rotation": 20, "ha": "right"}
        axes.set_xticks(range(len(labels)), [said(label) for label in labels], **slanted)
        axes.set_xlabel(axis)
        axes.set_ylabel(f"best {_label(kind)}")

    return drawing(paint, name, f"best {kind} against {axis}", SIZE)


def _bars(axes: Axes, xs: Sequence[float], rows: Sequence[Row], metric: str, number: int, results: Results) -> None:
    """Means with their spread; variants stand a little beside each other, so that no bar hides another."""
    shift = 0.03 * (number - (len(results.study.variants) - 1) / 2)
    unit = _unit(metric)
    means = [unit * row.mean(metric) for row in rows]
    spreads = [0.0 if math.isnan(row.spread(metric)) else unit * row.spread(metric) for row in rows]
    axes.errorbar([x + shift for x in xs], means, spreads, capsize=2, elinewidth=1, **look(number))


def for_bits(results: Results, place: Record, name: str) -> str:
    """What remains to be done after training (error, or loss) against bits on the wire, a point for each variant."""
    kind = kind_of(results)
    metric = f"best_val_{kind}"
    rows = [row for row in _at(results, place) if row.values(metric) and row.average("bits_per_param_sent") > 0]
    if not rows:
        return ""
    numbers = {variant: number for number, variant in enumerate(results.study.variants)}

    def paint(axes: Axes) -> None:
        for row in rows:
            mean, spread = _unit(metric) * row.mean(metric), _unit(metric) * row.spread(metric)
            y = 100 - mean if kind == "accuracy" else mean
            style = {**look(numbers[row.variant]), "linestyle": "none", "markersize": 7}
            bar = 0.0 if math.isnan(spread) else spread
            axes.errorbar(row.average("bits_per_param_sent"), y, bar, capsize=2, elinewidth=1, **style)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("bits sent per parameter and step, counted")
        axes.set_ylabel("lowest error, %" if kind == "accuracy" else "best loss")

    return drawing(paint, name, "error against bits", SIZE)


def _at(results: Results, place: Record) -> list[Row]:
    return [row for row in results.rows if row.place == place]


def _all_values(results: Results, axis: str) -> list[tuple[Any, ...]]:
    return [results.study.values(variant, axis) for variant in results.study.variants]


def _unit(metric: str) -> float:
    return 100.0 if metric.endswith("accuracy") else 1.0


def _label(kind: str) -> str:
    return "accuracy, %" if kind == "accuracy" else "loss"
