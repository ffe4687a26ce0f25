"""Tables of finished runs with faults, in Markdown."""

import statistics
from collections.abc import Sequence
from typing import Any

from fault_plan import KINDS, PHASES

Record = dict[str, Any]

OTHER_PHASES = {"batch": "", "always": ""}


def section(records: Sequence[Record]) -> str:
    """A line for each kind and phase of the fault that a run was about: its last one."""
    head = ["fault", "when", "runs", "held", "named by", "ended within", "broken"]
    rows = [head, ["---"] * 2 + ["---:"] * 4 + ["---"]]
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        fault = record["faults"][-1]
        groups.setdefault((fault["kind"], fault["phase"]), []).append(record)
    order = list(KINDS)
    for (kind, phase), runs in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        rows.append([KINDS[kind], {**PHASES, **OTHER_PHASES}[phase], *_figures(runs)])
    fired = sum(len(record["proof"]) for record in records)
    total = f"{len(records)} runs, {sum(r['ok'] for r in records)} held; {fired} faults, each proved to have happened."
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", total])


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
