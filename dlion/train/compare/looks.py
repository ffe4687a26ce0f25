"""How variants look in drawings: told apart by colour, by dashes and by markers, each of which is enough."""

from typing import Any

from matplotlib.axes import Axes

from dlion.train.page import drawing

# Okabe and Ito's colours, which colour-blind readers tell apart, in shades that stand out on light and dark ground.
COLOURS = ("#0a84c6", "#e06c00", "#009e73", "#cc79a7", "#8c8c8c", "#b59a00")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1.2, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p")


def look(number: int) -> dict[str, Any]:
    """Of the variant with this number; no two of the first twelve share colour and dashes, nor colour and marker."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.5,
    }


def key(number: int, name: str) -> str:
    """A piece of a variant's line, for a legend. name: unique in the page."""

    def paint(axes: Axes) -> None:
        axes.set_axis_off()
        axes.plot([0, 1, 2], [0, 0, 0], markevery=[1], **look(number))

    return drawing(paint, name, "", (0.55, 0.16))
