"""report.html: one file that opens offline, with the curves of a run and what it was made of."""

import html

from matplotlib.axes import Axes

from dlion.train.config import Settled, to_flags
from dlion.train.page import drawing, facts, page, table, text_of
from dlion.train.runs import Record, RunFolder, write_whole

# Two colours that colour-blind readers tell apart on light and dark ground (Okabe and Ito); the lines differ in style
# too.
TRAINING, VALIDATION = "#0a84c6", "#e06c00"

BODY = """<h1>{title}</h1>
<p>{subtitle}</p>
{facts}
{drawings}
<div class="tables">
<section><h2>Results</h2>{summary}</section>
<section><h2>Configuration</h2>{config}</section>
</div>"""


def write_report(folder: RunFolder, config: Settled, summary: Record) -> None:
    """Write the report of a finished run from its metrics."""
    title = folder.path.resolve().name
    body = BODY.format(
        title=html.escape(title),
        subtitle=html.escape(
            f"{summary['data']['name']}, model {summary['model']} with {summary['params']:,} parameters, "
            f"method {summary['method']}, {summary['workers']} workers, {summary['steps']:,} steps"
        ),
        facts=facts(_facts(summary)),
        drawings=_drawings(folder.records()),
        summary=table(_flat(summary)),
        config=table(to_flags(config)),
    )
    write_whole(folder.report_file, page(title, body))


def _facts(summary: Record) -> list[tuple[str, str]]:
    facts = [("validation loss", text_of(summary["val_loss"]))]
    if "val_accuracy" in summary:
        facts.insert(0, ("validation accuracy", f"{summary['val_accuracy']:.2%}"))
        facts.append((f"best accuracy, at step {summary['best_step']:,}", f"{summary['best_val_accuracy']:.2%}"))
    else:
        facts.append((f"best loss, at step {summary['best_step']:,}", text_of(summary["best_val_loss"])))
    return [
        *facts,
        ("bits sent per parameter and step", f"{summary['bits_per_param_sent']:.2f}"),
        ("MB sent by each worker", f"{summary['bytes_sent'] / 1e6:,.2f}"),
        ("times less than an fp32 ring all-reduce", f"{summary['ratio']:.1f}"),
        ("seconds of training", f"{summary['seconds']:.1f}"),
    ]


def _drawings(records: list[Record]) -> str:
    """Loss, and accuracy where there is one, against steps and against megabytes sent: a drawing each, as SVG."""
    metrics = ["loss", "accuracy"] if any("val_accuracy" in record for record in records) else ["loss"]
    panels = [
        _panel(records, metric, *against)
        for metric in metrics
        for against in (("step", 1.0, "step"), ("bytes_sent", 1e6, "MB sent by each worker"))
    ]
    return f'<div class="curves">{"".join(panels)}</div>'


def _panel(records: list[Record], metric: str, x: str, unit: float, label: str) -> str:
    def paint(axes: Axes) -> None:
        _curves(axes, records, metric, x, unit, label)

    return drawing(paint, f"{metric}-{x}", f"{metric} against {label}", (4.75, 3.2))


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
