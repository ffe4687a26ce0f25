"""From finished cells to the Markdown of the README: best learning rates, means, spreads, differences."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from documents import fill
from quality_cells import QualityError, Record, Settings


@dataclass(frozen=True)
class Metric:
    """What a task is judged by. `scale` turns the stored number into the printed one."""

    field: str
    title: str
    higher_is_better: bool
    scale: float
    digits: int

    def value(self, record: Record) -> float:
        """The printed number; NaN when the run has none or it is not finite."""
        stored = record[self.field]
        number = math.nan if stored is None else float(stored) * self.scale
        return number if math.isfinite(number) else math.nan

    def better(self, one: float, other: float) -> bool:
        return one > other if self.higher_is_better else one < other


ACCURACY = Metric("val_accuracy", "validation accuracy, %", True, 100.0, 2)
LOSS = Metric("val_loss", "validation loss", False, 1.0, 4)


@dataclass(frozen=True)
class Group:
    """All seeds of one method at one learning rate; `values` in the order of `seeds`."""

    method: str
    lr: float
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    records: tuple[Record, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """Sample standard deviation over the seeds; NaN for one seed."""
        if len(self.values) < 2 or math.isnan(self.mean):
            return math.nan
        return statistics.stdev(self.values)

    def average(self, field: str) -> float:
        return statistics.fmean(float(record[field]) for record in self.records)


def metric_of(records: Sequence[Record]) -> Metric:
    """Accuracy where the task has one, else loss."""
    return ACCURACY if any(record["val_accuracy"] is not None for record in records) else LOSS


def groups_of(records: Sequence[Record], metric: Metric) -> list[Group]:
    """The cells by method (in the order they appear) and rising learning rate."""
    methods = list(dict.fromkeys(record["method"] for record in records))
    groups = []
    for method in methods:
        for lr in sorted({record["lr"] for record in records if record["method"] == method}):
            chosen = [record for record in records if (record["method"], record["lr"]) == (method, lr)]
            chosen.sort(key=lambda record: int(record["seed"]))
            seeds = tuple(record["seed"] for record in chosen)
            groups.append(Group(method, lr, seeds, tuple(map(metric.value, chosen)), tuple(chosen)))
    return groups


def best_groups(groups: Sequence[Group], metric: Metric) -> dict[str, Group]:
    """Each method's learning rate with the best mean. One that diverged in any seed is never the best.

    Only learning rates with all the seeds of the folder take part, so that luck with few seeds does not win.
    """
    seeds = {seed for group in groups for seed in group.seeds}
    best: dict[str, Group] = {}
    for group in groups:
        if set(group.seeds) == seeds and not math.isnan(group.mean):
            if group.method not in best or metric.better(group.mean, best[group.method].mean):
                best[group.method] = group
    return best


def spread_of_difference(one: Group, other: Group) -> float:
    """The standard deviation of the difference of two single runs, one of each group."""
    return math.hypot(one.deviation, other.deviation)


def markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def number(value: float, digits: int) -> str:
    return "diverged" if math.isnan(value) else f"{value:.{digits}f}"


def with_deviation(group: Group, digits: int) -> str:
    if math.isnan(group.mean):
        return "diverged"
    spread = "" if math.isnan(group.deviation) else f" ± {group.deviation:.{digits}f}"
    return f"{group.mean:.{digits}f}{spread}"


def best_rows(groups: Sequence[Group], metric: Metric) -> list[str]:
    best = best_groups(groups, metric)
    seeds = len({seed for group in groups for seed in group.seeds})
    title = f"{metric.title} (mean ± standard deviation of {seeds} seeds)"
    rows = [
        markdown_row(["method", "best lr", title, "bits per parameter sent", "ratio to fp32"]),
        "|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(group.method for group in groups):
        if method not in best:
            rows.append(markdown_row([method, "none finished with all seeds", "", "", ""]))
            continue
        group = best[method]
        tried = [other.lr for other in groups if other.method == method]
        edge = " (edge of the grid)" if len(tried) > 1 and group.lr in (min(tried), max(tried)) else ""
        rows.append(
            markdown_row(
                [
                    method,
                    f"{group.lr:g}{edge}",
                    with_deviation(group, metric.digits),
                    f"{group.average('bits_per_param_sent'):.3f}",
                    f"{group.average('ratio'):.1f}",
                ]
            )
        )
    return rows


def difference_lines(groups: Sequence[Group], metric: Metric) -> list[str]:
    """For each method after the first: its difference from the first, and whether it exceeds the spread."""
    best = list(best_groups(groups, metric).values())
    lines = []
    for other in best[1:]:
        first = best[0]
        difference = first.mean - other.mean
        spread = spread_of_difference(first, other)
        if math.isnan(spread):
            verdict = "one seed, so its spread is not known"
        elif abs(difference) > spread:
            verdict = f"more than the spread, {spread:.{metric.digits}f}"
        else:
            verdict = f"within the spread, {spread:.{metric.digits}f}"
        lines.append(f"{first.method} minus {other.method}: {difference:+.{metric.digits}f}, {verdict}.")
    return lines


def grid_rows(groups: Sequence[Group], metric: Metric) -> list[str]:
    seeds = sorted({seed for group in groups for seed in group.seeds})
    rows = [
        markdown_row(["method", "lr", *(f"seed {seed}" for seed in seeds), "mean ± standard deviation"]),
        "|" + "---|" * (len(seeds) + 3),
    ]
    for group in groups:
        by_seed = dict(zip(group.seeds, group.values, strict=True))
        values = [number(by_seed[seed], metric.digits) if seed in by_seed else "not run" for seed in seeds]
        rows.append(markdown_row([group.method, f"{group.lr:g}", *values, with_deviation(group, metric.digits)]))
    return rows


def command_of(settings: Settings, groups: Sequence[Group]) -> str:
    """The command that makes these cells."""
    words = ["python bench/quality.py", "--task", settings.task, "--steps", str(settings.steps)]
    words += ["--workers", str(settings.workers)]
    words += ["--methods", *dict.fromkeys(group.method for group in groups)]
    words += ["--lrs", *(f"{lr:g}" for lr in sorted({group.lr for group in groups}))]
    words += ["--seeds", *(str(seed) for seed in sorted({seed for group in groups for seed in group.seeds}))]
    return " ".join([*words, *(["--", *settings.flags] if settings.flags else [])])


def markdown(settings: Settings, records: Sequence[Record]) -> str:
    """The whole section for one task. Raises: QualityError when no cell has finished."""
    if not records:
        raise QualityError("no cell has finished yet: run the grid first.")
    metric = metric_of(records)
    groups = groups_of(records, metric)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(records[0]["versions"].items()))
    lines = [
        f"Task `{settings.task}`, {settings.workers} workers, {settings.steps} steps; {versions}; "
        f"data SHA-256 `{records[0]['data_sha256'][:16]}…`. Made by",
        "",
        f"    {command_of(settings, groups)}",
        "",
        *best_rows(groups, metric),
        "",
        *difference_lines(groups, metric),
        "Spread: the standard deviation of the difference of two single runs, one of each method.",
        "",
        "<details><summary>Every run</summary>",
        "",
        *grid_rows(groups, metric),
        "",
        "</details>",
    ]
    return "\n".join(lines)


def fill_readme(readme: Path, task: str, section: str) -> None:
    """Replace what stands between the task's two marks.

    Raises: QualityError when the marks are not there once each.
    """
    try:
        fill(readme, "quality", task, section)
    except ValueError as error:
        raise QualityError(str(error)) from None
