"""index.html: one file that opens offline, with the bars and the figures of a measurement."""

import html
from typing import Any

from dlion.train.bench import bars
from dlion.train.bench.sentence import bare_exchange, duration, rate, shown
from dlion.train.bench.table import COLUMNS, COLUMNS_MEAN, PHASES_MEAN, cells, phases_of
from dlion.train.page import facts, grid, page, table

Result = dict[str, Any]

MODEL = """<p>The model: seconds of a step = local work + max(0, bytes / bandwidth + calls · latency − hidden). Local
work, latency and the backward pass are of this run; bytes are by formula. What overlaps the backward pass is hidden as
long as that takes. Both lines are lower bounds: the model leaves out waiting for slower workers, and what overlap costs
DDP's computation. PowerSGD has no line: it compresses and waits inside the backward pass, and what of that is work that
no network changes was not measured.</p>"""

CORES = "Where workers outnumber cores, a phase holds the time in which its worker had no core."


def page_of(result: Result) -> bytes:
    """The page, from what bench.json holds."""
    title = f"dlion bench, {result['workers']} workers"
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(_setting(result))}</p>",
        facts(_facts(result)),
        f"<p><b>{html.escape(result['sentence'])}</b></p>",
        _section(
            "Seconds a step",
            bars.steps(result),
            "<p>Median of the slowest worker's steps; the line holds the middle half of them.</p>",
        ),
        _section(
            "Where a vote's step spends them",
            bars.phases(result),
            _phases(result) + _paragraph(f"{PHASES_MEAN} {CORES}"),
        ),
        _section("Bytes", bars.traffic(result), _paragraph(bare_exchange(result))),
        _section("At other bandwidths", bars.bandwidths(result), MODEL),
        _section("Figures", _figures(result), _paragraph(" ".join(COLUMNS_MEAN))),
        '<div class="tables">',
        f"<section><h2>Settings</h2>{table(result['settings'])}</section>",
        f"<section><h2>Environment</h2>{table(result['environment'])}</section>",
        "</div>",
    ]
    return page(title, "\n".join(section for section in sections if section))


def _section(title: str, drawn: str, note: str = "") -> str:
    """Kept together in print."""
    return f'<section style="break-inside: avoid"><h2>{title}</h2>\n{drawn}\n{note}</section>' if drawn else ""


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _setting(result: Result) -> str:
    settings, environment = result["settings"], result["environment"]
    threads, sequences = environment["threads"], f"{settings['batch_size']} x {settings['tokens']}"
    return (
        f"GPT with {result['parameters']:,} parameters, {sequences} tokens a worker; {result['workers']} workers on "
        f"{environment['device']} with {threads} thread{'s' if threads > 1 else ''} each, {environment['backend']}; "
        f"{result['rounds']} rounds in {result['seconds']:.0f} s"
    )


def _facts(result: Result) -> list[tuple[str, str]]:
    even = result["break_even"]
    found = [
        (f"a step of {shown(name)}", duration(one["seconds"]))
        for name, one in result["contenders"].items()
        if name in _told(result)
    ]
    if even is not None and even["mbit_per_s"] is not None:
        found.append(("break-even bandwidth, by the model", rate(even["mbit_per_s"])))
    return found


def _told(result: Result) -> tuple[str, ...]:
    even = result["break_even"]
    return ("ddp fp32", even["contender"]) if even is not None else ()


def _figures(result: Result) -> str:
    return _grid(COLUMNS, {name: cells(result, name) for name in result["contenders"]})


def _phases(result: Result) -> str:
    spent = phases_of(result)
    rows = {name: [duration(seconds) for seconds in one.values()] for name, one in spent.items()}
    return _grid(tuple(next(iter(spent.values()), ())), rows)


def _grid(columns: tuple[str, ...], rows: dict[str, list[str]]) -> str:
    return grid(("", *columns), ([shown(name), *cells] for name, cells in rows.items()))
