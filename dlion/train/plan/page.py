"""index.html: one file that opens offline, with the drawings and the figures of a plan."""

import html
from typing import Any

from dlion.train.bench.sentence import duration
from dlion.train.page import facts, page, table
from dlion.train.plan import drawings
from dlion.train.plan.methods import BASE
from dlion.train.plan.table import COLUMNS, COLUMNS_MEAN, by_number, cells, even, heads, overhead, setting

Result = dict[str, Any]

MODEL = """<p>The model: a call takes hops · latency + messages · overhead + bytes over the busiest link / its rate. All
workers of a node share one link to the others. A ring of an all-reduce or an all-gather crosses it once; an all-to-all
crosses it once for each worker of the node. With overlap a bucket leaves as soon as the backward pass has made its
gradients and the link is free.</p>"""

# Figures stay whole: where they do not fit, their table scrolls; on paper, which cannot scroll, it is smaller.
STYLE = """<style>
.grid { overflow-x: auto; }
.grid table { white-space: nowrap; font-size: 0.85rem; }
.grid th, .grid td { padding-right: 0.8rem; }
.grid td, .grid th + th { text-align: right; }
@media print { .grid table { font-size: 0.7rem; } }
</style>"""


def page_of(result: Result) -> bytes:
    """The page, from what plan.json holds."""
    asked = result["settings"]
    title = f"dlion plan, {asked['workers']:,} workers"
    methods = {name: cells(found) for name, found in result["methods"].items()}
    topologies = {name: cells(found)[:-1] for name, found in result["topologies"].items()}
    left_out = "".join(f"<li>{html.escape(text)}</li>" for text in result["left_out"])
    sections = [
        STYLE,
        f"<h1>{html.escape(title)}</h1>",
        _paragraph(setting(result)),
        facts(_facts(result)),
        _section("Seconds a step", drawings.steps(result), MODEL),
        _section("Bytes", drawings.traffic(result), _paragraph(overhead(result))),
        _section("At other bandwidths", drawings.bandwidths(result)),
        _section("With other numbers of workers", drawings.numbers(result), "<p>Each worker keeps its batch.</p>"),
        _section("Figures", _grid(COLUMNS, methods), _paragraph(" ".join(COLUMNS_MEAN))),
        _section("Other topologies", _grid(COLUMNS[:-1], topologies)),
        _section("A step with other numbers of workers", _grid(heads(result), by_number(result, "seconds"))),
        _section("Bits a parameter", _grid(heads(result), by_number(result, "bits_per_parameter"))),
        f"<section><h2>What this leaves out</h2><ul>{left_out}</ul></section>",
        '<div class="tables">',
        f"<section><h2>Settings</h2>{table(asked)}</section>",
        f"<section><h2>Nanoseconds for each parameter</h2>{table(result['rates'])}</section>",
        "</div>",
    ]
    return page(title, "\n".join(sections))


def _facts(result: Result) -> list[tuple[str, str]]:
    methods = result["methods"]
    steps = [(f"a step of {name}", duration(methods[name]["seconds"])) for name in (BASE, "dlion-mavo")]
    found = methods["dlion-mavo"]["break_even"]
    if found is None:
        return steps
    quicker = f"dlion-mavo is quicker than {BASE}"
    return [*steps, (f"below this, {quicker}" if found["pays"] == "below" else quicker, even(found))]


def _section(title: str, shown: str, note: str = "") -> str:
    """Kept together in print."""
    return f'<section style="break-inside: avoid"><h2>{title}</h2>\n{shown}\n{note}</section>'


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _grid(columns: tuple[str, ...] | list[str], rows: dict[str, list[str]]) -> str:
    text = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *columns))
    for name, figures in rows.items():
        text += f"</tr>\n<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in figures)}"
    return f'<div class="grid" tabindex="0"><table><tr>{text}</tr></table></div>'
