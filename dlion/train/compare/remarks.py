"""What readers of a study's table must know: how it was made, and what is missing in it."""

from dlion.train.compare.cells import said
from dlion.train.compare.choose import rule, unsearched
from dlion.train.compare.results import Results

SPREAD = "± is the standard deviation over seeds."
DIFFERENCE = (
    "Within or beyond: the spread of the difference, the standard deviation of that of two single runs, one of each."
)
EDGE = "(edge): the lowest or highest value that was tried."
DIVERGED = "Means leave out the seeds that diverged."


def remarks(results: Results) -> list[str]:
    """Sentences for below the table, those that it needs."""
    several = [row for row in results.rows if len(row.seeds) > 1]
    found = [SPREAD] if several else []
    if len(results.study.variants) > 1 and several:
        found.append(DIFFERENCE)
    if any(row.diverged for row in results.rows):
        found.append(DIVERGED)
    if undecided := _undecided(results):
        found.append(f"Not in the table, since cells are missing or every setting diverged: {undecided}.")
    if not unsearched(results.study):
        found.append(f"Settings were chosen by this rule: {rule(results.study)}")
    if any(row.edges for row in results.rows):
        found.append(EDGE)
    return found


def made_of(results: Results) -> str:
    """One line about versions, data and the flags of all runs."""
    if not results.records:
        return "Nothing has run yet."
    record = next(iter(results.records.values()))
    versions = ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items()))
    flags = " ".join(f"--{flag} {said(value)}" for flag, value in results.study.train.items())
    how = "simulated workers" if results.study.simulate else "real workers"
    sets = [one["data"] for one in results.records.values()]
    data = sorted({f"{one['name']} (SHA-256 {one['sha256'][:16]}…)" for one in sets})
    return f"All runs: `{flags}`; {how}; {'; '.join(data)}; {versions}; {len(results.records)} runs."


def _undecided(results: Results) -> str:
    shown = {row.variant for row in results.rows}
    return ", ".join(variant for variant in results.study.variants if variant not in shown)
