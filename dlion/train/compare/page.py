"""report.html: one file that opens offline, with the figures, the tables and what they were made of."""

import html
from typing import Any

from dlion.train.compare import figures
from dlion.train.compare.cells import said
from dlion.train.compare.choose import metric_of
from dlion.train.compare.figures import Against
from dlion.train.compare.looks import key
from dlion.train.compare.remarks import made_of, remarks
from dlion.train.compare.results import Record, Results
from dlion.train.compare.table import (
    TITLES,
    best_columns,
    best_rows,
    grid_columns,
    grid_rows,
    number,
)
from dlion.train.page import facts, grid, page, table

STYLE = """<style>
.key { display: flex; flex-wrap: wrap; gap: 0 1.2rem; margin: 0.4rem 0; padding: 0; list-style: none; }
.key svg { width: 2.5rem; vertical-align: middle; margin-right: 0.3rem; }
figure { margin: 0; max-width: 32rem; break-inside: avoid; }
figcaption { font-size: 0.85rem; }
.key, figcaption { break-after: avoid; }
.key { break-inside: avoid; }
@media print {
  .curves { grid-template-columns: 1fr 1fr; }
  .grid { overflow: visible; }
  .grid table { font-size: 7pt; white-space: normal; break-inside: auto; }
  .grid th, .grid td { overflow-wrap: normal; }
  .grid th { white-space: normal; }
  .grid th, .grid td { padding-right: 0.6rem; }
  .grid tr { break-inside: avoid; }
}
</style>"""

BITS = "Bits are counted, headers and padding included: what each worker sends for a parameter in a step."


def page_of(results: Results, mbit: float, step_ms: float | None) -> bytes:
    """The page. step_ms: milliseconds that a worker computes in a step; None takes what these runs took."""
    study = results.study
    title = study.title or f"dlion compare: {study.train.get('task', '')}"
    seconds = figures.step_seconds(results) if step_ms is None else step_ms / 1000
    sections = [
        STYLE,
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(made_of(results).replace('`', ''))}</p>",
        _notes(study.notes),
        facts(_facts(results)),
        _table(results),
        *_figures(results, mbit, seconds, measured=step_ms is None),
        _section("The grid", _paragraph(f"{TITLES[metric_of(study)]}:"), _grid(results)),
        '<div class="tables">',
        f"<section><h2>All runs</h2>{table(study.train)}</section>",
        f"<section><h2>Made by</h2>{table(_environment(results))}</section>",
        "</div>",
    ]
    return page(title, "\n".join(section for section in sections if section))


def _table(results: Results) -> str:
    body = grid(best_columns(results, results.metrics), best_rows(results, results.metrics))
    return _section("Each at its best setting", body, _paragraph(" ".join(remarks(results))))


def _figures(results: Results, mbit: float, seconds: float, *, measured: bool) -> list[str]:
    kind = figures.kind_of(results)
    estimate = (
        f"Estimated: {1000 * seconds:.3g} ms of computing a step and worker "
        f"({'the median over these runs, on this machine' if measured else 'as given'}), the same for all, then the "
        f"bytes sent at {mbit:g} Mbit/s. Latency, overlap and waiting for others are left out."
    )
    return [
        _drawn(results, f"{kind.capitalize()} against epochs", "epochs", _curves(results, figures.epochs(), kind)),
        *(_axis(results, axis) for axis in results.study.axes),
        _drawn(results, f"{'Error' if kind == 'accuracy' else 'Loss'} against bits", "bits", _bits(results), BITS),
        _drawn(results, "Loss against bytes", "bytes", _curves(results, figures.megabytes(), "loss")),
        _drawn(
            results,
            "Loss against time",
            "time",
            _curves(results, figures.seconds(mbit, seconds), "loss"),
            estimate,
        ),
    ]


def _curves(results: Results, against: Against, kind: str) -> list[tuple[str, str]]:
    places = results.places()
    return [
        (_words(place), figures.curves(results, place, against, kind, f"{against.name}-{number}"))
        for number, place in enumerate(places)
    ]


def _bits(results: Results) -> list[tuple[str, str]]:
    return [
        (_words(place), figures.for_bits(results, place, f"bits-{number}"))
        for number, place in enumerate(results.places())
    ]


def _axis(results: Results, axis: str) -> str:
    """The best metric against one axis, a drawing for each place of the others."""
    rests = {str({**place, axis: None}): {**place, axis: None} for place in results.places()}
    drawn = [
        (
            _words({a: v for a, v in rest.items() if a != axis}),
            figures.against_axis(results, axis, rest, f"{axis}-{number}"),
        )
        for number, rest in enumerate(rests.values())
    ]
    kind = figures.kind_of(results)
    return _drawn(results, f"Best {kind} against {axis}", f"axis-{axis}", drawn, "Bars: standard deviation over seeds.")


def _drawn(results: Results, title: str, name: str, drawn: list[tuple[str, str]], note: str = "") -> str:
    """A section with a legend and its drawings: (caption, drawing); empty without any."""
    panels = [
        f"<figure>{f'<figcaption>{html.escape(caption)}</figcaption>' if caption else ''}{picture}</figure>"
        for caption, picture in drawn
        if picture
    ]
    if not panels:
        return ""
    body = f'{_legend(results, name)}<div class="curves">{"".join(panels)}</div>'
    return _section(title, body, _paragraph(note) if note else "")


def _legend(results: Results, name: str) -> str:
    items = (
        f"<li>{key(number, f'key-{name}-{number}')}{html.escape(variant)}</li>"
        for number, variant in enumerate(results.study.variants)
    )
    return f'<ul class="key">{"".join(items)}</ul>'


def _section(title: str, *parts: str) -> str:
    return "\n".join([f"<section><h2>{html.escape(title)}</h2>", *(part for part in parts if part), "</section>"])


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _notes(notes: tuple[str, ...]) -> str:
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<ul>{items}</ul>" if items else ""


def _grid(results: Results) -> str:
    return grid(grid_columns(results), grid_rows(results))


def _words(place: Record) -> str:
    return ", ".join(f"{axis} {said(value)}" for axis, value in place.items())


def _facts(results: Results) -> list[tuple[str, str]]:
    metric = metric_of(results.study)
    found = [("runs", f"{len(results.records):,}")]
    for place in results.places()[:2]:
        rows = [row for row in results.rows if row.place == place and row.values(metric)]
        if rows:
            best = (max if results.higher_is_better else min)(rows, key=lambda row: row.mean(metric))
            where = f", {_words(place)}" if place else ""
            name, comma, unit = TITLES[metric].partition(", ")
            reached = number(metric, best.mean(metric)) + (f" {unit}" if comma else "")
            found.append((f"{name} of {best.variant}{where}", reached))
    return found


def _environment(results: Results) -> dict[str, Any]:
    for record in results.records.values():
        data, versions = record["data"], record["versions"]
        how = {"device": record["device"], "threads": record["threads"], "simulated": record["simulated"]}
        return {**versions, **how, "data": data["name"], "SHA-256 of the data": data["sha256"]}
    return {}
