"""Hold every effect that the paper reports to the studies in docs/results: the tables of docs/paper-results.md.

    python bench/effects.py --docs docs/paper-results.md

A difference counts when it is larger than its spread: the standard deviation of the difference of two single runs, one
of each method, over the seeds. It is negative where the change hurts, for losses too.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from documents import fill
from result_tables import ROOT

from dlion.train.compare.choose import metric_of
from dlion.train.compare.command import settle
from dlion.train.compare.folder import StudyFolder
from dlion.train.compare.results import Results, Row
from dlion.train.compare.study import read_study
from dlion.train.compare.table import scaled

RESULTS = ROOT / "docs" / "results"
SIGNS = {"helped": 1, "hurt": -1}  # any other effect of the paper, such as "mixed", has none
LOST = ("graddrop", "dgc", "terngrad")


@dataclass(frozen=True)
class Effect:
    """One row of the paper's effects, and the small studies that repeat it.

    Attributes:
        pairs: methods (before, after the change); empty where the change is of the number of workers.
        studies: folders of docs/results.
    """

    changed: str
    where: str
    measured: str
    effect: str
    pairs: tuple[tuple[str, str], ...]
    studies: tuple[str, ...]
    not_run: str


NO_IMAGENET, NO_TEXT = "ImageNet-1K is not at hand", "OpenWebText is not at hand"
TOO_LONG = "200 epochs of a 9.5 M-parameter ViT take months on two cores"
MAVO, AVG = (("g-lion", "dlion-mavo"),), (("dlion-mavo", "dlion-avg"),)
EFFECTS = (
    Effect(
        *("D-Lion MaVo instead of global Lion", "ImageNet-1K", "top-1 79.82 -> 79.69; 80.99 -> 80.79", "hurt"),
        *(MAVO, ("cifar10",), NO_IMAGENET),
    ),
    Effect(
        *("the same", "OpenWebText", "perplexity 18.35 -> 18.37; 14.66 -> 14.66", "mixed"),
        *(MAVO, ("text",), NO_TEXT),
    ),
    Effect(
        *("Avg instead of MaVo", "ImageNet-1K", "top-1 79.69 -> 80.11; 80.79 -> 81.13", "helped"),
        *(AVG, ("cifar10",), NO_IMAGENET),
    ),
    Effect(
        *("the same", "OpenWebText", "perplexity 18.37 -> 18.39; 14.66 -> 14.69", "hurt"),
        *(AVG, ("text",), NO_TEXT),
    ),
    Effect(
        *("the same", "3-shot instruction fine-tuning", "the seven accuracies of Table 3", "mixed"),
        *(AVG, ("finetune",), "LLaMA 7B and the instructions are not at hand"),
    ),
    Effect(
        *("Signum instead of Lion, Avg or MaVo", "CIFAR-10", "test accuracy", "hurt"),
        *((("dlion-mavo", "d-signum-mavo"), ("dlion-avg", "d-signum-avg")), ("cifar10", "text"), TOO_LONG),
    ),
    Effect(
        *("D-Lion instead of GradDrop, DGC or TernGrad", "CIFAR-10", "test accuracy", "helped"),
        tuple((lost, won) for won in ("dlion-mavo", "dlion-avg") for lost in LOST),
        *(("cifar10", "text"), TOO_LONG),
    ),
    Effect(
        *("more workers, same optimizer", "CIFAR-10", "test accuracy", "hurt"),
        *((), ("cifar10", "text"), TOO_LONG),
    ),
)


@dataclass(frozen=True)
class Seen:
    """What one study shows of an effect at one place.

    Attributes:
        better: how much better the metric is after the change, in its printed unit. spread: see above.
    """

    study: str
    place: str
    change: str
    before: float
    after: float
    better: float
    spread: float
    digits: int
    verdict: str


def verdict(better: float, spread: float, effect: str) -> str:
    """What a difference says of the paper's effect; of one without a sign it says only what happened here."""
    if math.isnan(better) or math.isnan(spread):
        return "not run yet"
    if abs(better) <= spread:
        return "within noise"
    here = 1 if better > 0 else -1
    if effect in SIGNS:
        return "confirmed" if SIGNS[effect] == here else "not confirmed"
    return "helped here" if here > 0 else "hurt here"


def seen_in(effect: Effect, name: str, results: Results) -> Iterator[Seen]:
    """The effect in one study, place by place."""
    rows = {(row.variant, str(row.place)): row for row in results.rows}
    if effect.pairs:
        for before, after in effect.pairs:
            for place in results.places():
                pair = rows.get((before, str(place))), rows.get((after, str(place)))
                yield from _seen(effect, name, results, _words(place), f"{before} -> {after}", *pair)
        return
    for variant in results.study.variants:
        mine = sorted((row for row in results.rows if row.variant == variant), key=lambda row: row.place["workers"])
        if len(mine) > 1:
            change = f"{mine[0].place['workers']} -> {mine[-1].place['workers']} workers"
            yield from _seen(effect, name, results, variant, change, mine[0], mine[-1])


def _words(place: dict[str, Any]) -> str:
    return ", ".join(f"{value} {axis}" for axis, value in place.items())


def _seen(
    effect: Effect, name: str, results: Results, place: str, change: str, before: Row | None, after: Row | None
) -> Iterator[Seen]:
    if before is None or after is None:
        return
    metric, sign = metric_of(results.study), 1 if results.higher_is_better else -1
    unit, digits = scaled(metric, 1.0)
    old, new = unit * before.mean(metric), unit * after.mean(metric)
    better, spread = sign * (new - old), unit * math.hypot(before.spread(metric), after.spread(metric))
    yield Seen(name, place, change, old, new, better, spread, digits, verdict(better, spread, effect.effect))


def all_seen() -> list[tuple[int, Effect, list[Seen]]]:
    """(number, effect, what the studies show of it)."""
    found = []
    for number, effect in enumerate(EFFECTS, start=1):
        seen = [
            one
            for name in effect.studies
            if (results := results_of(name)) is not None
            for one in seen_in(effect, name, results)
        ]
        found.append((number, effect, seen))
    return found


def results_of(name: str) -> Results | None:
    """The study in docs/results/NAME; None where it has not been begun."""
    folder = StudyFolder(RESULTS / name)
    if not folder.study_file.is_file():
        return None
    return Results(settle(read_study(folder.study_file), None), folder.records())


def table_of_effects(found: list[tuple[int, Effect, list[Seen]]]) -> str:
    """One row for each effect: the paper's, and how many of ours say what."""
    lines = [
        "| # | what was changed | where | paper: measured | paper: effect | there | in our small studies |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, effect, seen in found:
        said = [one.verdict for one in seen]
        counts = ", ".join(f"{said.count(word)} {word}" for word in dict.fromkeys(said))
        lines.append(
            f"| {number} | {effect.changed} | {effect.where} | {effect.measured} | {effect.effect} | not run, because "
            f"{effect.not_run} | {counts or 'not run yet'} |"
        )
    return "\n".join(lines)


def table_of_differences(found: list[tuple[int, Effect, list[Seen]]]) -> str:
    """One row for each difference that the counts above are made of."""
    lines = [
        "| # | study | at | change | before | after | better by | spread | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for number, _, seen in found:
        for one in seen:
            values = [f"{value:.{one.digits}f}" for value in (one.before, one.after, one.spread)]
            better = f"{one.better:+.{one.digits}f}"
            shown = [*values[:2], better, values[2]] if one.verdict != "not run yet" else [""] * 4
            lines.append(
                f"| {number} | {one.study} | {one.place} | {one.change} | {' | '.join(shown)} | {one.verdict} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, help="document whose marks are filled; without it both tables are printed")
    options = parser.parse_args()
    found = all_seen()
    tables = {"paper": table_of_effects(found), "small": table_of_differences(found)}
    try:
        for part, table in tables.items():
            if options.docs:
                fill(options.docs, "effects", part, table)
            else:
                print(table, end="\n\n")
    except (ValueError, OSError) as error:
        print(f"effects.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
