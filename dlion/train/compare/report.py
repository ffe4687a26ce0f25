"""The files that a study leaves for readers and for other programs."""

import json
import math
from typing import Any

from dlion.train.compare.choose import to_json
from dlion.train.compare.folder import StudyFolder
from dlion.train.compare.page import page_of
from dlion.train.compare.results import Record, Results, Row
from dlion.train.compare.study import METRICS, Study, told_by
from dlion.train.compare.table import csv_of, markdown, show
from dlion.train.runs import write_whole


def write_reports(
    folder: StudyFolder, study: Study, records: dict[str, Record], mbit: float, step_ms: float | None
) -> None:
    """Write table.md, table.csv, report.json and report.html from what is recorded; show the table, and say where."""
    results = Results(study.anywhere(), records)
    write_whole(folder.path / "table.md", markdown(results).encode())
    write_whole(folder.path / "table.csv", csv_of(results).encode())
    write_whole(folder.path / "report.json", (json.dumps(json_of(results), indent=1) + "\n").encode())
    write_whole(folder.path / "report.html", page_of(results, mbit, step_ms))
    show(results)
    print(f"report: {folder.path / 'report.html'}")


def json_of(results: Results) -> Record:
    """All results: the study, the choices, the rows of both tables."""
    return {
        "study": told_by(results.study),
        "chosen": to_json(results.study, results.chosen),
        "best": [_row(results, row) for row in results.rows],
        "grid": [_row(results, row) for row in results.grid],
    }


def _row(results: Results, row: Row) -> Record:
    return {
        results.study.compare: row.variant,
        "place": row.place,
        "setting": row.setting,
        "at the edge of the grid": list(row.edges),
        "seeds": list(row.seeds),
        "recorded": len(row.found),
        "diverged": row.diverged,
        **{
            metric: {
                "mean": _finite(row.mean(metric)),
                "spread": _finite(row.spread(metric)),
                "values": row.values(metric),
            }
            for metric in METRICS
        },
        **{key: _finite(row.average(key)) for key in ("bits_per_param_sent", "bits_per_param_received", "bytes_sent")},
    }


def _finite(value: float) -> Any:
    return value if math.isfinite(value) else None
