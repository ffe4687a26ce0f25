"""Tables of finished runs with faults, in Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fault_plan import KINDS, PHASES

Record = dict[str, Any]

OTHER_PHASES = {"batch": "", "always": ""}


def parts(found: Mapping[str, Sequence[Record]]) -> dict[str, str]:
    """The table of each experiment of which there is one, by its name: what stands between the marks of a document."""
    made = {name: of_kinds(found[name]) for name in ("short", "static", "soak") if found[name]}
    if found["elastic"]:
        made["elastic"] = of_kills(found["elastic"])
    if found["elastic-return"]:
        made["elastic-return"] = of_returns(found["elastic-return"], found["elastic-whole"])
    return made


def of_kinds(records: Sequence[Record]) -> str:
    """A line for each kind and phase of the fault that a run was about: its last one."""
    head = ["fault", "when", "runs", "held", "named by", "ended within", "broken"]
    rows = [head, ["---"] * 2 + ["---:"] * 4 + ["---"]]
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        fault = record["faults"][-1]
        groups.setdefault((fault["kind"], fault["phase"]), []).append(record)
    phases = {**PHASES, **OTHER_PHASES}
    for kind, phase in [(kind, phase) for kind in KINDS for phase in phases if (kind, phase) in groups]:
        runs = groups[kind, phase]
        rows.append([KINDS[kind], phases[phase], *_figures(runs)])
    fired = sum(len(record["proof"]) for record in records)
    total = f"{len(records)} runs, {sum(r['ok'] for r in records)} held; {fired} faults, each proved to have happened."
    return _page(rows, total)


def of_kills(records: Sequence[Record]) -> str:
    """A line for each phase in which an elastic worker was killed."""
    head = ["killed", "runs", "finished", "equal replicas", "steps lost by a survivor", "stall, median", "longest"]
    rows = [head, ["---"] + ["---:"] * 6]
    for phase, name in PHASES.items():
        runs = [record for record in records if record["faults"][0]["phase"] == phase]
        if runs:
            rows.append([name, *_survival(runs)])
    rows.append(["all", *_survival(records)])
    broken = sorted({f"{r['cell']}: {name}" for r in records for name, held in r["checks"].items() if not held})
    return _page(rows, f"Not held: {', '.join(broken) or 'nothing'}.")


def _survival(runs: Sequence[Record]) -> list[str]:
    stalls = [run["stall"] for run in runs]
    return [
        str(len(runs)),
        str(sum(run["checks"]["finished"] for run in runs)),
        str(sum(run["checks"]["equal replicas"] for run in runs)),
        f"at most {max(run['lost'] for run in runs)}",
        f"{statistics.median(stalls):.1f} s",
        f"{max(stalls):.1f} s",
    ]


def of_returns(records: Sequence[Record], whole: Sequence[Record]) -> str:
    """Runs in which a killed worker came back, beside runs without fault."""
    steps = [run["whole after"] for run in records if run["whole after"] is not None]
    rows = [["", "runs", "finished", "equal replicas", "voted again after", "final loss"]]
    rows.append(["---"] + ["---:"] * 5)
    after = f"{max(steps)} steps at most (median {statistics.median(steps):g}), {len(steps)} of {len(records)}"
    for name, runs, when in (("kill and return", records, after), ("no fault", whole, "")):
        if runs:
            held = [str(sum(run["checks"][check] for run in runs)) for check in ("finished", "equal replicas")]
            rows.append([name, str(len(runs)), *held, when, _spread([run["loss"] for run in runs])])
    return _page(rows, _compared(records, whole))


def _spread(losses: Sequence[float]) -> str:
    deviation = statistics.stdev(losses) if len(losses) > 1 else 0.0
    return f"{statistics.mean(losses):.3f} ± {deviation:.3f} ({min(losses):.3f} to {max(losses):.3f})"


def _compared(records: Sequence[Record], whole: Sequence[Record]) -> str:
    """The final losses of equal seeds, side by side."""
    without = {tuple(run["flags"]): run["loss"] for run in whole}
    pairs = [(run["loss"], without[tuple(run["flags"])]) for run in records if tuple(run["flags"]) in without]
    if len(pairs) < 2:
        return "There are no runs without fault to compare the losses with."
    differences = [mine - other for mine, other in pairs]
    losses = [other for _, other in pairs]
    mean, deviation = statistics.mean(losses), statistics.stdev(losses)
    within = sum(abs(mine - mean) <= 2 * deviation for mine, _ in pairs)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return (
        f"{within} of {len(pairs)} losses lie within two standard deviations of those without fault; "
        f"seed by seed the difference is {statistics.mean(differences):+.4f} ± {error:.4f} (standard error)."
    )


def _page(rows: Sequence[Sequence[str]], below: str) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", below])


def _figures(runs: Sequence[Record]) -> list[str]:
    naming = [(r["naming"], r["others"]) for r in runs if r.get("naming") is not None]
    seconds = [r["seconds to end"] for r in runs if "seconds to end" in r]
    broken = sorted({name for r in runs for name, held in r["checks"].items() if not held})
    return [
        str(len(runs)),
        str(sum(r["ok"] for r in runs)),
        f"{sum(n for n, _ in naming)} of {sum(m for _, m in naming)}" if naming else "",
        f"{max(seconds):.1f} s (median {statistics.median(seconds):.1f})" if seconds else "",
        ", ".join(broken),
    ]
