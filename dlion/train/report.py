"""report.html: one file that opens offline, with the curves of a run and what it was made of."""

import html
import io
import logging
import re
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlion.train.config import Settled, to_flags
from dlion.train.runs import Record, RunFolder, write_whole

# Two colours that colour-blind readers tell apart on light and dark ground (Okabe and Ito); the lines differ
# in style too. INK stands for the text colour of the page and is replaced in the drawing.
TRAINING, VALIDATION, INK = "#0a84c6", "#e06c00", "#010203"

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
section {{ flex: 1 1 20rem; }}
th {{ font-weight: normal; opacity: 0.75; white-space: nowrap; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{subtitle}</p>
<ul class="facts">{facts}</ul>
{drawing}
<div class="tables">
<section><h2>Results</h2>{summary}</section>
<section><h2>Configuration</h2>{config}</section>
</div>
</body>
</html>
"""


def write_report(folder: RunFolder, config: Settled, summary: Record) -> None:
    """Write the report of a finished run from its metrics."""
    page = PAGE.format(
        title=html.escape(folder.path.resolve().name),
        subtitle=html.escape(
            f"{summary['data']['name']}, model {summary['model']} with {summary['params']:,} parameters, "
            f"method {summary['method']}, {summary['workers']} workers, {summary['steps']:,} steps"
        ),
        facts="".join(f"<li><b>{html.escape(value)}</b>{html.escape(name)}</li>" for name, value in _facts(summary)),
        drawing=_drawing(folder.records()),
        summary=_table(_flat(summary)),
        config=_table(to_flags(config)),
    )
    write_whole(folder.report_file, page.encode(errors="backslashreplace"))


def _facts(summary: Record) -> list[tuple[str, str]]:
    facts = [("validation loss", _text(summary["val_loss"]))]
    if "val_accuracy" in summary:
        facts.insert(0, ("validation accuracy", f"{summary['val_accuracy']:.2%}"))
        facts.append((f"best accuracy, at step {summary['best_step']:,}", f"{summary['best_val_accuracy']:.2%}"))
    else:
        facts.append((f"best loss, at step {summary['best_step']:,}", _text(summary["best_val_loss"])))
    return [
        *facts,
        ("bits sent per parameter and step", f"{summary['bits_per_param_sent']:.2f}"),
        ("MB sent by each worker", f"{summary['bytes_sent'] / 1e6:,.2f}"),
        ("times less than an fp32 ring all-reduce", f"{summary['ratio']:.1f}"),
        ("seconds of training", f"{summary['seconds']:.1f}"),
    ]


def _drawing(records: list[Record]) -> str:
    """Loss, and accuracy where there is one, against steps and against megabytes sent: a drawing each, as SVG."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    metrics = ["loss", "accuracy"] if any("val_accuracy" in record for record in records) else ["loss"]
    panels = [
        _panel(records, metric, *against)
        for metric in metrics
        for against in (("step", 1.0, "step"), ("bytes_sent", 1e6, "MB sent by each worker"))
    ]
    return f'<div class="curves">{"".join(panels)}</div>'


def _panel(records: list[Record], metric: str, x: str, unit: float, label: str) -> str:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.75, 3.2), layout="constrained")
        _curves(figure.subplots(), records, metric, x, unit, label)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawing = buffer.getvalue()
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing[drawing.index("<svg") :], flags=re.DOTALL)
    # names must not repeat in a page, and every drawing has the same ones
    drawing = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{metric}-{x}-", drawing)
    drawing = drawing.replace(INK, "currentColor")
    return drawing.replace("<svg", f'<svg role="img" aria-label="{metric} against {label}"', 1)


def _curves(axes: Axes, records: list[Record], metric: str, x: str, unit: float, label: str) -> None:
    lines = [(f"val_{metric}", "validation", VALIDATION, "o-")]
    if metric == "loss":
        lines.insert(0, ("loss", "training", TRAINING, "-"))
    for key, name, colour, style in lines:
        points = [(record[x] / unit, record[key]) for record in records if None not in (record.get(key), record.get(x))]
        axes.plot(
            [a for a, _ in points],
            [b for _, b in points],
            style,
            color=colour,
            label=name,
            markersize=3.5,
            linewidth=1.5,
        )
    axes.set_xlabel(label)
    axes.set_ylabel(metric)
    axes.set_xlim(left=0)
    axes.legend()


def _flat(summary: Record) -> Record:
    flat: Record = {}
    for key, value in summary.items():
        if isinstance(value, dict):
            flat |= {f"{key} {inner}": content for inner, content in value.items()}
        else:
            flat[key] = value
    return flat


def _table(values: Record) -> str:
    rows = (
        f"<tr><th>{html.escape(key)}</th><td>{html.escape(_text(value))}</td></tr>" for key, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return " ".join(_text(item) for item in value)
    return "-" if value is None else str(value)
