"""The drawings of a plan."""

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter

from dlion.train.bench.sentence import bits, duration, volume
from dlion.train.page import INK, drawing
from dlion.train.plan.methods import ALONE, BASE
from dlion.train.plan.table import least

Result = dict[str, Any]

# Okabe and Ito's colours, which colour-blind readers tell apart; patterns and dashes for print without colours.
PARTS = {
    "compute": ("#9a9a9a", ""),
    "local": ("#009e73", "...."),
    "exposed": ("#e69f00", "////"),
}
LINES = {
    BASE: ("#e06c00", "--"),
    "ddp-fp16": ("#b8860b", ":"),
    "ddp-powersgd": ("#009e73", (0, (6, 1, 1, 1))),
    "g-adamw": ("#9a9a9a", "-"),
    "dgc": ("#cc79a7", "-."),
    "dlion-avg": ("#56b4e9", (0, (3, 1))),
    "dlion-mavo": ("#0a84c6", "-"),
    "dlion-mavo, overlap": ("#0a84c6", (0, (1, 1))),
}
ABOVE: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "handlelength": 2.4}
WIDTH, ROW, REST = 7.2, 0.3, 0.9  # inches
ROOM = 1.25  # of the axis beyond the longest bar, for its value


def steps(result: Result) -> str:
    """Seconds of a step of every method, by parts."""
    methods = result["methods"]

    def paint(axes: Axes) -> None:
        for place, found in enumerate(methods.values()):
            left = 0.0
            for part, (colour, pattern) in PARTS.items():
                look: dict[str, Any] = {"color": colour, "hatch": pattern, "edgecolor": "white", "linewidth": 0}
                axes.barh(place, found[part], 0.66, left, label=part if place == 0 else None, **look)
                left += found[part]
            _value(axes, place, left, least(found) + duration(left))
        _rows(axes, list(methods), max(found["seconds"] for found in methods.values()))
        axes.set_xlabel("seconds a step")
        axes.legend(ncols=len(PARTS), **ABOVE)

    return drawing(paint, "steps", "seconds of a step by method", (WIDTH, REST + ROW * (len(methods) + 1)))


def traffic(result: Result) -> str:
    """Bytes that a worker sends in a step, on a logarithmic axis."""
    methods = {name: found for name, found in result["methods"].items() if found["sent"]}

    def paint(axes: Axes) -> None:
        for place, (name, found) in enumerate(methods.items()):
            colour = "#0a84c6" if name.startswith("dlion") else "#9a9a9a"
            axes.barh(place, found["sent"], 0.66, color=colour)
            _value(axes, place, found["sent"], volume(found["sent"]))
        axes.set_xscale("log")
        _rows(axes, list(methods), max(found["sent"] for found in methods.values()))
        least_sent = min(found["sent"] for found in methods.values())
        axes.set_xlim(least_sent / 3, 8 * max(found["sent"] for found in methods.values()))
        axes.xaxis.set_major_formatter(lambda value, _: volume(value))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("bytes that the busiest worker sends in a step")

    if not methods:
        return "<p>One worker alone sends nothing.</p>"
    return drawing(paint, "traffic", "bytes sent in a step by method", (WIDTH, REST + ROW * len(methods)))


def bandwidths(result: Result) -> str:
    """Seconds of a step against bandwidth."""
    found, asked = result["bandwidths"], result["settings"]
    between = result["nodes"] > 1
    here = 1e9 * (asked["bandwidth"] if between else asked["inside_bandwidth"])
    reach = [1e9 * value for value in found["gbit_per_s"]]

    def paint(axes: Axes) -> None:
        _lines(axes, reach, found["seconds"])
        axes.axvline(here, color=INK, linewidth=1, label="as asked")
        axes.set_xlim(min(1e7, here), max(1e12, here))
        _decades(axes.xaxis, bits)
        axes.set_xlabel(f"bit/s of the link {'between nodes' if between else 'of a worker'}")
        axes.legend(ncols=3, **ABOVE)

    return drawing(paint, "bandwidths", "seconds of a step against bandwidth", (WIDTH, 3.8))


def numbers(result: Result) -> str:
    """Seconds of a step against the number of workers."""
    found = result["numbers"]

    def paint(axes: Axes) -> None:
        _lines(axes, found["workers"], found["seconds"])
        _decades(axes.xaxis, lambda value: f"{value:,.0f}")
        axes.set_xlabel("workers")
        axes.legend(ncols=3, **ABOVE)

    return drawing(paint, "numbers", "seconds of a step against the number of workers", (WIDTH, 3.8))


def _lines(axes: Axes, across: list[float], seconds: dict[str, list[float]]) -> None:
    for name, (colour, style) in LINES.items():
        axes.plot(across, seconds[name], linestyle=style, color=colour, label=name)
    axes.plot(across, seconds[ALONE], color=INK, linewidth=0.8, alpha=0.6, label=ALONE)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _decades(axes.yaxis, duration)
    axes.set_ylabel("a step")


def _decades(axis: Axis, text: Callable[[float], str]) -> None:
    axis.set_major_locator(LogLocator(subs=(1,)))
    axis.set_major_formatter(lambda value, _: text(value))
    axis.set_minor_formatter(NullFormatter())


def _rows(axes: Axes, names: list[str], longest: float) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0 if axes.get_xscale() == "linear" else None, ROOM * longest)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)


def _value(axes: Axes, place: float, after: float, text: str) -> None:
    axes.annotate(text, (after, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
