"""The drawings of a measurement: bars whose values stand beside them, since some are too small to be seen."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter

from dlion.train.bench.break_even import Terms
from dlion.train.bench.sentence import bits, duration, rate, shown, volume
from dlion.train.bench.table import phases_of
from dlion.train.page import INK, drawing

Result = dict[str, Any]

# Okabe and Ito's colours, which colour-blind readers tell apart, and a pattern for each, for print without colours.
VOTER, OTHER = "#0a84c6", "#9a9a9a"
COUNTED, SEEN = ("#0a84c6", ""), ("#e69f00", "////")
LOOKS = {
    "compute": ("#9a9a9a", ""),
    "ballot": ("#0a84c6", ""),
    "wait": ("#e69f00", "////"),
    "tally": ("#009e73", "...."),
    "apply": ("#cc79a7", "xxxx"),
}
ABOVE: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "handlelength": 1.6}
WIDTH, ROW, REST = 7.2, 0.42, 0.9  # inches
ROOM = 1.22  # of the axis beyond the longest bar, for its value


def steps(result: Result) -> str:
    """Seconds of a step by contender: the median, and a line that holds the middle half of the steps."""
    contenders = result["contenders"]
    quarters = {name: np.percentile(found["steps"], [25, 75]) for name, found in contenders.items()}

    def paint(axes: Axes) -> None:
        for place, (name, found) in enumerate(contenders.items()):
            axes.barh(place, found["seconds"], 0.62, color=VOTER if name.startswith("dlion") else OTHER)
            axes.plot(quarters[name], [place, place], color=INK, linewidth=1)
            _value(axes, place, quarters[name][1], duration(found["seconds"]))
        _rows(axes, list(contenders), max(high for _, high in quarters.values()))
        axes.set_xlabel("seconds a step")

    return _drawn(paint, "steps", "seconds of a step by contender", len(contenders))


def phases(result: Result) -> str:
    """Where the time of a vote's step goes, stacked; empty without a contender that votes."""
    shown = phases_of(result)
    if not shown:
        return ""

    def paint(axes: Axes) -> None:
        for place, spent in enumerate(shown.values()):
            left = 0.0
            for phase, (colour, pattern) in LOOKS.items():
                label = phase if place == 0 else None
                _bar(axes, place, spent[phase], 0.62, (colour, pattern), label, left)
                left += spent[phase]
            _value(axes, place, left, duration(left))
        _rows(axes, list(shown), max(sum(spent.values()) for spent in shown.values()))
        axes.set_xlabel("seconds a step")
        axes.legend(ncols=len(LOOKS), **ABOVE)

    return _drawn(paint, "phases", "seconds by phase", len(shown) + 1)


def traffic(result: Result) -> str:
    """Bytes that a worker sends in a step: by counter or formula, and through its interface."""
    contenders = result["contenders"]
    seen = result["interface"] is not None

    def paint(axes: Axes) -> None:
        high = 0.36 if seen else 0.62
        for place, found in enumerate(contenders.values()):
            bars = [
                (
                    found["sent_by_formula"] if found["sent"] is None else found["sent"],
                    COUNTED,
                    "counted, or by formula",
                )
            ]
            if seen:
                bars.append((found["interface_sent"], SEEN, f"interface {result['interface']['name']}"))
            for index, (value, look, label) in enumerate(bars):
                at = place + high * (index - (len(bars) - 1) / 2)
                _bar(axes, at, value / 1e6, high, look, label if place == 0 else None)
                _value(axes, at, value / 1e6, volume(value), 8.5)
        longest = max(max(found["sent_by_formula"], found["interface_sent"] or 0) for found in contenders.values())
        _rows(axes, list(contenders), max(longest / 1e6, 1e-9))
        axes.set_xlabel("MB that each worker sends in a step")
        axes.legend(ncols=2, **ABOVE)

    return _drawn(paint, "traffic", "megabytes sent in a step by contender", 1.2 * len(contenders) + 1)


def bandwidths(result: Result) -> str:
    """The model's step against bandwidth; empty without a break-even."""
    even = result["break_even"]
    if even is None:
        return ""
    equal = even["mbit_per_s"] or 1000.0
    reach = np.geomspace(min(10.0, equal / 2), max(10_000.0, 2 * equal), 200)

    def paint(axes: Axes) -> None:
        lines = (("ddp", "ddp fp32", "#e06c00", "--"), ("dlion", even["contender"], VOTER, "-"))
        for which, name, colour, style in lines:
            terms = Terms(**even[which])
            axes.plot(1e6 * reach, [terms.seconds(8e-6 / at) for at in reach], style, color=colour, label=shown(name))
        if even["mbit_per_s"]:
            label = f"equal at {rate(even['mbit_per_s'])}"
            axes.axvline(1e6 * even["mbit_per_s"], color=INK, linewidth=1, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        _decades(axes.xaxis, (1,), bits)
        _decades(axes.yaxis, (1, 2, 5), duration)
        axes.set_xlabel("bit/s")
        axes.set_ylabel("a step, by the model")
        axes.legend(ncols=3, **ABOVE)

    return drawing(paint, "bandwidths", "the model's seconds of a step against bandwidth", (WIDTH, 3.4))


def _decades(axis: Axis, ticks: tuple[int, ...], text: Callable[[float], str]) -> None:
    axis.set_major_locator(LogLocator(subs=ticks))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_formatter(NullFormatter())


def _drawn(paint: Callable[[Axes], None], name: str, label: str, rows: float) -> str:
    return drawing(paint, name, label, (WIDTH, REST + ROW * rows))


def _bar(
    axes: Axes, place: float, value: float, high: float, look: tuple[str, str], label: str | None, left: float = 0.0
) -> None:
    colour, pattern = look
    axes.barh(place, value, high, left, color=colour, hatch=pattern, edgecolor="white", linewidth=0, label=label)


def _rows(axes: Axes, names: list[str], longest: float) -> None:
    axes.set_yticks(range(len(names)), [shown(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, ROOM * longest)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)


def _value(axes: Axes, place: float, after: float, text: str, size: float = 10) -> None:
    axes.annotate(text, (after, place), (4, 0), textcoords="offset points", va="center", fontsize=size)
