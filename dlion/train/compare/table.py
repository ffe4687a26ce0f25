"""The results as tables: markdown, CSV and the terminal."""

import csv
import io
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from dlion.train.compare.cells import said
from dlion.train.compare.choose import metric_of, value_of
from dlion.train.compare.remarks import made_of, remarks
from dlion.train.compare.results import Results, Row

TITLES = {
    "val_accuracy": "last accuracy, %",
    "best_val_accuracy": "best accuracy, %",
    "val_loss": "last loss",
    "best_val_loss": "best loss",
}
WIDTH = 120  # where the output has no width of its own


def scaled(metric: str, value: float) -> tuple[float, int]:
    """The printed number (accuracies in percent) and its digits."""
    return (100 * value, 2) if metric.endswith("accuracy") else (value, 4)


def number(metric: str, value: float) -> str:
    """A metric for readers."""
    shown, digits = scaled(metric, value)
    return "" if math.isnan(shown) else f"{shown:.{digits}f}"


def with_spread(row: Row, metric: str) -> str:
    """'87.88 ± 0.24', or what there is of it: seeds that diverged or are not recorded are told."""
    mean, spread = row.mean(metric), row.spread(metric)
    parts = [number(metric, mean) + ("" if math.isnan(spread) else f" ± {number(metric, spread)}")]
    if row.diverged:
        parts.append(f"{row.diverged} of {len(row.found)} diverged")
    if missing := len(row.records) - len(row.found):
        parts.append(f"{missing} of {len(row.records)} not run")
    return ", ".join(part for part in parts if part)


def best_columns(results: Results, metrics: Sequence[str]) -> list[str]:
    """The header of the table of best settings."""
    study = results.study
    searched = list(dict.fromkeys(axis for row in results.rows for axis in row.setting))
    first = next(iter(study.variants))
    others = [f"minus {first}"] if len(study.variants) > 1 else []
    titles = [TITLES[metric] for metric in metrics]
    return [*study.axes, study.compare, *searched, titles[0], *others, *titles[1:], "bits/param", "ratio to fp32"]


def best_rows(results: Results, metrics: Sequence[str]) -> list[list[str]]:
    """Every variant at its best setting, under `best_columns`."""
    study = results.study
    searched = list(dict.fromkeys(axis for row in results.rows for axis in row.setting))
    table = []
    for row in results.rows:
        settings = [said(row.setting[axis]) if axis in row.setting else "" for axis in searched]
        marked = [
            f"{text} (edge)" if axis in row.edges else text for axis, text in zip(searched, settings, strict=True)
        ]
        others = [_difference(results, row)] if len(study.variants) > 1 else []
        with_spreads = [with_spread(row, metric) for metric in metrics]
        table.append(
            [
                *(said(value) for value in row.place.values()),
                row.variant,
                *marked,
                *with_spreads[:1],
                *others,
                *with_spreads[1:],
                f"{row.average('bits_per_param_sent'):.2f}" if row.found else "",
                f"{row.average('ratio'):.1f}" if row.found else "",
            ]
        )
    return table


def _difference(results: Results, row: Row) -> str:
    found = results.difference(row)
    if found is None:
        return ""
    metric = metric_of(results.study)
    difference, digits = scaled(metric, found[0])
    if math.isnan(found[1]):
        return f"{difference:+.{digits}f}"
    word = "within" if abs(found[0]) <= found[1] else "beyond"
    return f"{difference:+.{digits}f}, {word} {number(metric, found[1])}"


def grid_columns(results: Results) -> list[str]:
    """The header of the table of the grid."""
    searched = list(dict.fromkeys(axis for row in results.grid for axis in row.setting))
    return [
        *results.study.axes,
        results.study.compare,
        *searched,
        *(f"seed {said(s)}" for s in _seeds(results)),
        "mean",
    ]


def grid_rows(results: Results) -> list[list[str]]:
    """Every setting searched, under `grid_columns`: the metric that counts, seed by seed."""
    metric = metric_of(results.study)
    searched = list(dict.fromkeys(axis for row in results.grid for axis in row.setting))
    table = []
    for row in results.grid:
        by_seed = dict(zip(row.seeds, row.records, strict=True))
        cells = [_cell(by_seed.get(seed), seed in by_seed, metric) for seed in _seeds(results)]
        settings = [said(row.setting[axis]) if axis in row.setting else "" for axis in searched]
        places = (said(value) for value in row.place.values())
        table.append([*places, row.variant, *settings, *cells, with_spread(row, metric)])
    return table


def _seeds(results: Results) -> list[Any]:
    return list(dict.fromkeys(seed for row in results.grid for seed in row.seeds))


def _cell(record: dict[str, Any] | None, asked: bool, metric: str) -> str:
    if record is None:
        return "not run" if asked else ""
    return "diverged" if record["diverged"] else number(metric, value_of(record, metric))


def markdown(results: Results) -> str:
    """The whole document."""
    title = f"# {results.study.title}\n\n" if results.study.title else ""
    return title + section(results) + "\n"


def section(results: Results) -> str:
    """Both tables and what they are made of, for a document that has a title of its own."""
    study = results.study
    notes = [f"- {note}" for note in study.notes]
    return "\n".join(
        [
            *notes,
            *([""] if notes else []),
            made_of(results),
            "",
            *rows_of(best_columns(results, results.metrics), best_rows(results, results.metrics)),
            "",
            " ".join(remarks(results)),
            "",
            "<details><summary>The grid</summary>",
            "",
            f"{TITLES[metric_of(study)]}:",
            "",
            *rows_of(grid_columns(results), grid_rows(results)),
            "",
            "</details>",
        ]
    )


def rows_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def csv_of(results: Results) -> str:
    """One line for each variant, place and seed at its best setting and for each cell of the grid, unrounded."""
    study = results.study
    axes = list(dict.fromkeys([*study.axes, *study.grid, *(a for own in study.grid_of.values() for a in own)]))
    keys = ["steps", "epoch_steps", "params", "bits_per_param_sent", "bits_per_param_received", "bytes_sent"]
    keys += ["bytes_received", "ratio", "abstentions", "seconds"]
    metrics = ["val_accuracy", "best_val_accuracy", "val_loss", "best_val_loss", "best_step"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", study.compare, *axes, "seed", "diverged", *metrics, *keys])
    for table, rows in (("best", results.rows), ("grid", results.grid)):
        for row in rows:
            for seed, record in zip(row.seeds, row.records, strict=True):
                if record is not None:
                    where = row.place | row.setting
                    numbers = ["" if record.get(key) is None else record[key] for key in [*metrics, *keys]]
                    labels = [where.get(axis, "") for axis in axes]
                    writer.writerow([table, row.variant, *labels, seed, int(record["diverged"]), *numbers])
    return text.getvalue()


def show(results: Results, stream: TextIO | None = None) -> None:
    """The table of best settings on the terminal, of the metric that counts alone."""
    console = Console(file=stream or sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    table = Table(*best_columns(results, results.metrics[:1]), box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in best_rows(results, results.metrics[:1]):
        table.add_row(*row)
    with suppress(OSError, SystemExit):  # rich wants to end the process where nobody reads on, as after `| head`
        console.print()
        console.print(table)
        if results.rows:
            console.print()
        console.print(*remarks(results), sep="\n", style="dim")
