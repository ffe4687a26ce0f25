"""Pages that open offline, in print and on dark ground: one file of HTML with drawings in it."""

import html
import io
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Stands for the text colour of the page and is replaced in a drawing.
INK = "#010203"

STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "dlion",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: 0; }}
h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
svg {{ width: 100%; height: auto; }}
.curves {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }}
.facts {{ display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1.5rem 0; padding: 0; list-style: none; }}
.facts b {{ display: block; font-size: 1.5rem; line-height: 1.2; }}
.tables {{ display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: flex-start; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; vertical-align: top; padding: 0.15rem 1.5rem 0.15rem 0; overflow-wrap: anywhere; }}
svg, table {{ break-inside: avoid; }}
.grid {{ overflow-x: auto; }}
.grid table {{ white-space: nowrap; font-size: 0.85rem; }}
.grid th, .grid td {{ padding-right: 1.1rem; }}
@media print {{ .grid table {{ font-size: 0.75rem; }} }}
h1, h2 {{ break-after: avoid; }}
section {{ flex: 1 1 20rem; }}
th {{ font-weight: normal; opacity: 0.75; white-space: nowrap; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def page(title: str, body: str) -> bytes:
    """A whole page with `body`, which is HTML."""
    return PAGE.format(title=html.escape(title), body=body).encode(errors="backslashreplace")


def facts(values: list[tuple[str, str]]) -> str:
    """Some figures in large letters: (name, figure)."""
    items = (f"<li><b>{html.escape(value)}</b>{html.escape(name)}</li>" for name, value in values)
    return f'<ul class="facts">{"".join(items)}</ul>'


def drawing(paint: Callable[[Axes], None], name: str, label: str, size: tuple[float, float]) -> str:
    """What `paint` draws, as SVG.

    Args:
        name: unique in the page.
        label: what is shown, for those who do not see it.
        size: inches.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure.subplots())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # names must not repeat in a page, and every drawing has the same ones
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = text.replace(INK, "currentColor")
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def table(values: dict[str, Any]) -> str:
    """Names and values in two columns."""
    rows = (
        f"<tr><th>{html.escape(key)}</th><td>{html.escape(text_of(value))}</td></tr>" for key, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"


def grid(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Figures stay whole: where a table does not fit it scrolls; on paper, which cannot scroll, it is smaller.

    Rows are led by the first of their cells.
    """
    text = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    for first, *others in rows:
        figures = "".join(f"<td>{html.escape(cell)}</td>" for cell in others)
        text += f"</tr>\n<tr><th>{html.escape(first)}</th>{figures}"
    return f'<div class="grid" tabindex="0"><table><tr>{text}</tr></table></div>'


def text_of(value: Any) -> str:
    """A value for readers."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return " ".join(text_of(item) for item in value) or "-"
    return "-" if value is None else str(value)
