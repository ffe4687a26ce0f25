"""From finished experiments to the Markdown of docs/benchmarks.md. Every number printed comes from a results file."""

import statistics
from collections.abc import Iterable, Sequence

from network_experiments import EXPERIMENTS, TARGETS, Experiment, Record, Target
from packets import HEADERS_LEAST, HEADERS_MOST

Results = dict[str, Record]

TITLES = {
    "no communication": "no communication",
    "ddp fp32": "DDP fp32",
    "ddp fp16": "DDP, fp16 hook",
    "powersgd 2": "DDP, PowerSGD rank 2",
    "dlion": "dlion",
    "dlion overlap": "dlion, overlap",
}
PHASES = ("compute", "ballot", "wait", "tally", "apply")
ABSENT = "not measured"
WITHIN = 0.02  # of the formula
MOST_16_TO_4 = 1.26  # the formula says 1.25
MOST_TENSORS = 1.6


def parts(results: Results) -> dict[str, str]:
    """The generated parts of the document, by their marks."""
    return {
        "targets": "\n".join([*target_rows(results), *missed_lines(results)]),
        "seconds": "\n".join(seconds_rows(results)),
        "bytes": "\n".join(bytes_rows(results)),
        "tensors": "\n".join(tensor_rows(results)),
        "bounds": "\n".join(bound_rows(results)),
        "made": "\n".join(made_lines(results)),
    }


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def head(cells: Sequence[str]) -> list[str]:
    return [row(cells), "|" + "---|" * len(cells)]


def three(value: float | None) -> str:
    """Three digits, and never fewer before the point."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def title_of(experiment: str) -> str:
    return next(one.title for one in EXPERIMENTS if one.name == experiment)


def steps_experiments() -> list[Experiment]:
    """Those of the document, which are of four workers; docs/plan.md has the others."""
    return [one for one in EXPERIMENTS if one.command[0] == "-m" and one.workers == 4]


def runs(results: Results, experiment: str) -> list[Record]:
    """The runs of an experiment; none if it has not finished."""
    return list(results[experiment]["figures"]["runs"]) if experiment in results else []


def ranks(results: Results, experiment: str) -> list[Record]:
    """The figures of every rank in every run of an experiment."""
    return [rank for run in runs(results, experiment) for rank in run["ranks"]]


def median(values: Iterable[float | None]) -> float | None:
    """None if there are none, or one is missing."""
    known = list(values)
    return statistics.median(known) if known and None not in known else None


def seconds(run: Record, contender: str) -> float | None:
    found = run["contenders"].get(contender)
    return float(found["seconds"]) if found else None


def ratio(results: Results, experiment: str, slow: str, fast: str) -> float | None:
    """The median over the runs of the ratio within a run."""
    pairs = [(seconds(run, slow), seconds(run, fast)) for run in runs(results, experiment)]
    return median(None if a is None or b is None else a / b for a, b in pairs)


def judged(target: Target, results: Results) -> tuple[str, str, str]:
    """Measured with dlion as it is by default, with overlap, and whether the target was reached."""
    plain = ratio(results, target.experiment, target.slow, target.fast)
    overlapped = ratio(results, target.experiment, target.slow, "dlion overlap") if target.fast == "dlion" else None
    if plain is None:
        return ABSENT, "", ""
    if target.reached(plain):
        word = "yes"
    elif overlapped is not None and target.reached(overlapped):
        word = "with overlap"
    else:
        word = "**no**"
    if target.slow == "dlion overlap":
        return "", three(plain), word
    return three(plain), three(overlapped), word


def target_rows(results: Results) -> list[str]:
    rows = head(["link", "step of ... / step of ...", "target", "measured", "with overlap", "reached"])
    for target in TARGETS:
        compared = f"{TITLES[target.slow]} / {TITLES[target.fast]}"
        limit = f"{'≥' if target.sense == '>=' else '≤'} {target.limit:g}"
        rows.append(row([title_of(target.experiment), compared, limit, *judged(target, results)]))
    return rows


def missed_lines(results: Results) -> list[str]:
    """What bounds the step where a target was not reached."""
    lines = []
    for target in TARGETS:
        if judged(target, results)[2] != "**no**":
            continue
        voting = target.slow if target.slow == "dlion overlap" else target.fast
        other = target.fast if voting == target.slow else target.slow
        taken = {name: seconds_of(results, target.experiment, name) for name in (voting, other)}
        phases = phases_of(results, target.experiment, voting)
        largest = sorted(phases.items(), key=lambda item: -item[1])
        spent = ", ".join(f"{name} {three(1e3 * value)} ms" for name, value in largest) or "phases not measured"
        lines.append(
            f"{title_of(target.experiment)}, {TITLES[target.slow]} / {TITLES[target.fast]}: not reached. A step of "
            f"{TITLES[voting]} takes {three(taken[voting])} s ({spent}), of {TITLES[other]} {three(taken[other])} s; "
            f"{exchange_words(results, target.experiment)}."
        )
    return ["", *(f"- {line}" for line in lines)] if lines else []


def seconds_of(results: Results, experiment: str, contender: str) -> float | None:
    return median(seconds(run, contender) for run in runs(results, experiment))


def phases_of(results: Results, experiment: str, contender: str) -> dict[str, float]:
    """Seconds of each phase of a step, the median of the runs; those that were measured."""
    key = "overlap_phases" if contender == "dlion overlap" else "phases"
    found = [run.get(key) or {} for run in runs(results, experiment)]
    medians = {name: median(run.get(name) for run in found) for name in PHASES}
    return {name: value for name, value in medians.items() if value is not None}


def exchange_words(results: Results, experiment: str) -> str:
    payload, taken, rate = exchange_of(results, experiment)
    return f"the bare exchange of {three(payload)} MB alone takes {three(taken)} ms ({three(rate)} Mbit/s)"


def exchange_of(results: Results, experiment: str) -> tuple[float | None, float | None, float | None]:
    """The bare exchange: MB a worker sends, milliseconds, Mbit/s."""
    bare = [run["bare_exchange"] for run in runs(results, experiment)]
    payload, taken = (median(one[key] for one in bare) for key in ("payload", "seconds"))
    if payload is None or taken is None:
        return None, None, None
    return payload / 1e6, taken * 1e3, 8 * payload / taken / 1e6


def seconds_rows(results: Results) -> list[str]:
    rows = head(["link", *TITLES.values()])
    for experiment in steps_experiments():
        if experiment.name in results:
            cells = [three(seconds_of(results, experiment.name, name)) for name in TITLES]
            rows.append(row([experiment.title, *cells]))
        else:
            rows.append(row([experiment.title, ABSENT, *[""] * (len(TITLES) - 1)]))
    return rows


def bound_rows(results: Results) -> list[str]:
    """Milliseconds of each phase, and of the bare exchange."""
    rows = head(["link", "", *PHASES, "bare exchange, ms", "its payload, MB", "its rate, Mbit/s"])
    for experiment in steps_experiments():
        payload, taken, rate = exchange_of(results, experiment.name)
        for contender in ("dlion", "dlion overlap"):
            phases = phases_of(results, experiment.name, contender)
            if phases:
                cells = [three(1e3 * phases[name]) if name in phases else "" for name in PHASES]
                bare = [three(taken), three(payload), three(rate)]
                rows.append(row([experiment.title, TITLES[contender], *cells, *bare]))
    return rows


def bytes_rows(results: Results) -> list[str]:
    """Means over the workers; the deviation is the worst of any worker in any direction."""
    columns = ("without headers", "of it sent twice", "worst deviation", "on the interface", "headers", "reached")
    rows = head(["workers", "vote", "formula", *columns])
    for experiment in EXPERIMENTS:
        if not experiment.name.startswith("bytes-"):
            continue
        vote = experiment.command[-1]
        found = ranks(results, experiment.name)
        if not found:
            rows.append(row([str(experiment.workers), vote, ABSENT, *[""] * len(columns)]))
            continue
        ways = [(rank[f"payload_{way}"], rank[f"interface_{way}"]) for rank in found for way in ("sent", "received")]
        formula = found[0]["formula"]
        payload, moved = (statistics.fmean(pair[k] for pair in ways) for k in (0, 1))
        worst = max(abs(pair[0] / formula - 1) for pair in ways)
        headers = moved / payload - 1
        honest = worst <= WITHIN and HEADERS_LEAST <= headers <= HEADERS_MOST
        again = statistics.fmean(rank["repeated"] for rank in found)
        cells = [
            f"{formula:,.0f}",
            f"{payload:,.0f}",
            f"{again:,.0f}",
            f"{worst:.2%}",
            f"{moved:,.0f}",
            f"{headers:.1%}",
        ]
        rows.append(row([str(experiment.workers), vote, *cells, "yes" if honest else "**no**"]))
    return [*rows, *growth_lines(results)]


def growth_lines(results: Results) -> list[str]:
    """How little more a worker sends among 16 than among 4. Headers apart: more peers have smaller messages."""
    bare, whole = (
        [median(rank[key] for rank in ranks(results, f"bytes-majority-{workers}")) for workers in (4, 16)]
        for key in ("payload_sent", "interface_sent")
    )
    if None in bare:
        return []
    growth, with_headers = (float(many or 0) / float(few or 1) for few, many in (bare, whole))
    word = "reached" if growth <= MOST_16_TO_4 else "**not reached**"
    return [
        "",
        f"Bytes that a worker sends among 16 workers / among 4: {growth:.3f} without headers (target ≤ {MOST_16_TO_4}, "
        f"the formula's is 1.25: {word}), {with_headers:.3f} with them.",
    ]


def tensor_rows(results: Results) -> list[str]:
    """1 M parameters in so many tensors."""
    rows = head(["tensors", "collective calls a step", "step() of dlion, ms", "step() of fused AdamW, ms"])
    found = [run["ranks"][0] for run in runs(results, "tensors")]
    if not found:
        return [*rows, row([ABSENT, "", "", ""])]
    for n in (1, 10, 1000):
        calls, lion, adam = (
            median(run[f"{name}_{n}"] for run in found) for name in ("calls", "dlion_seconds", "adamw_seconds")
        )
        rows.append(row([f"{n:,}", three(calls), three((lion or 0) * 1e3), three((adam or 0) * 1e3)]))
    lion, adam = (
        median(run[f"{name}_seconds_1000"] / run[f"{name}_seconds_1"] for run in found) or 0.0
        for name in ("dlion", "adamw")
    )
    more = [
        three(1e3 * (median(run[f"{name}_seconds_1000"] - run[f"{name}_seconds_1"] for run in found) or 0.0))
        for name in ("dlion", "adamw")
    ]
    equal = "equal" if all(run["calls_10"] == run["calls_1000"] for run in found) else "**not equal**"
    word = "reached" if lion <= MOST_TENSORS else "**not reached**"
    return [
        *rows,
        "",
        f"Calls for 10 and for 1,000 tensors are {equal} (target: equal). 1,000 tensors / 1 tensor: dlion {lion:.2f} "
        f"(target ≤ {MOST_TENSORS}: {word}), fused AdamW {adam:.2f}. 999 tensors more take dlion {more[0]} ms, fused "
        f"AdamW {more[1]} ms.",
    ]


def made_lines(results: Results) -> list[str]:
    """Commands, and the environments that they ran in."""
    lines: list[str] = []
    for environment in {str(sorted(r["environment"].items())): r["environment"] for r in results.values()}.values():
        names = [name for name, record in results.items() if record["environment"] == environment]
        facts = ", ".join(f"{key} {value}" for key, value in environment.items())
        lines += [f"- `python bench/network.py --only {' '.join(names)}`: {facts}."]
    return lines or ["- nothing has been measured yet."]
