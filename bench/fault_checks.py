"""What must hold after a fault, where the number of workers is fixed; and one cell from its start to its record."""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_plan import WORKERS, Cell, Fault
from fault_runs import BOUND, STOP_BOUND, Attempt, attempt, disk_for, flags_of, proofs

Record = dict[str, Any]

ENDING = ("kill", "stop", "full")  # kinds that end a run of a fixed number of workers
REPEATED = ("nan",)  # kinds that are a matter of the data, so that a resumed run and one without interruption meet them
ALIKE = "model-last.safetensors"


@dataclass
class Verdict:
    """What was looked at and whether it held, and figures beside it."""

    checks: dict[str, bool] = field(default_factory=dict)
    figures: Record = field(default_factory=dict)
    said: list[str] = field(default_factory=list)  # by workers that failed


@dataclass(frozen=True)
class Course:
    """How a run went that nothing ended: parameters after each step, the last model, and what was counted."""

    parameters: Mapping[int, int]
    model: str
    abstentions: int
    buckets: int
    t: int


class Courses:
    """Runs without interruption, made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[Any, ...], Course] = {}

    def of(self, cell: Cell) -> Course:
        """That of the cell, with what is a matter of its data. Raises: RuntimeError when it fails."""
        data = tuple(fault for fault in cell.faults if fault.kind in REPEATED)
        key = (cell.steps, cell.flags, data)
        if key not in self._known:
            where = self._folder / f"whole-{len(self._known)}"
            command = [*flags_of(cell), "--out", str(where), "--name", "run"]
            made = attempt(where / "workers", command, data, where)
            if made.statuses != [0] * WORKERS:
                raise RuntimeError(f"a run without interruption failed: {said_by(made)}")
            self._known[key] = course(made, where / "run")
            shutil.rmtree(where)
        return self._known[key]


def course(made: Attempt, run: Path) -> Course:
    steps = made.steps()[0]
    model = hashlib.sha256((run / ALIKE).read_bytes()).hexdigest()
    abstentions = json.loads((run / "summary.json").read_text())["abstentions"]
    buckets = next(event["buckets"] for event in made.events[0] if event["event"] == "layout")
    return Course(
        {n: facts["parameters"] for n, facts in steps.items()}, model, abstentions, buckets, steps[max(steps)]["t"]
    )


def run_cell(cell: Cell, folder: Path, courses: Courses) -> Record:
    """Run the cell; what was seen of it, as JSON.

    Raises: NotFiredError when a fault did not happen.
    """
    began = time.monotonic()
    with disk_for(cell.faults, folder) as disk:
        command = [*flags_of(cell), "--out", str(disk), "--name", "run"]
        made = attempt(folder / "first", command, cell.faults, disk)
        proof = proofs(made, cell.faults)
        ends = [fault for fault in cell.faults if fault.kind in ENDING]
        verdict = Verdict()
        verdict.checks["nobody hung"] = not made.hung
        _replicas(made, verdict)
        if ends:
            _ended(made, ends[0], verdict)
            (disk / "filler").unlink(missing_ok=True)
            again = [fault for fault in cell.faults if fault.kind in REPEATED]
            last = attempt(folder / "second", [*flags_of(cell), "--resume", str(disk / "run")], again, disk)
            verdict.figures["resumed after"] = min(last.steps()[0], default=0) - 1
            if last.statuses != [0] * WORKERS:
                verdict.said += said_by(last)
            _replicas(last, verdict)
        else:
            last = made
        _finished(cell, last, disk / "run", courses.of(cell), verdict)
    record = cell.described() | {"proof": proof, "ok": all(verdict.checks.values()), "checks": verdict.checks}
    return record | {**verdict.figures, "said": verdict.said, "seconds": round(time.monotonic() - began, 1)}


def _replicas(made: Attempt, verdict: Verdict) -> None:
    """All workers that did a step have the same parameters after it, and nothing is infinite or NaN."""
    found: dict[int, set[int]] = {}
    for steps in made.steps():
        for step, facts in steps.items():
            found.setdefault(step, set()).add(facts["parameters"])
    finite = all(facts["finite"] for steps in made.steps() for facts in steps.values())
    checks = verdict.checks
    checks["equal replicas"] = checks.get("equal replicas", True) and all(len(each) == 1 for each in found.values())
    checks["finite"] = checks.get("finite", True) and finite


def _ended(made: Attempt, fault: Fault, verdict: Verdict) -> None:
    """The others end soon, with a status that says so and sentences instead of a traceback, and name the worker."""
    others = [worker for worker in made.workers if worker.rank != fault.rank]
    said = {worker.rank: worker.said() for worker in made.workers}
    hit = made.stopped.get(fault.rank) or (made.fired(fault.name) or {"at": 0.0})["at"]
    late = max(worker.ended_at for worker in others) - hit
    bound = STOP_BOUND if fault.kind == "stop" else BOUND
    naming = [worker.rank for worker in others if names(said[worker.rank], fault.rank)]
    verdict.figures |= {"seconds to end": round(late, 2), "naming": len(naming), "others": len(others)}
    verdict.checks["others ended with status 1"] = all(worker.ended == 1 for worker in others)
    verdict.checks["within the bound"] = not made.hung and late <= bound
    verdict.checks["no traceback"] = not any("Traceback" in text for text in said.values())
    if fault.kind == "full":
        own = said[fault.rank]
        verdict.checks["says that the disk is full"] = any("No space left on device" in text for text in said.values())
        verdict.figures["naming"] = None
        verdict.said += [last_line(own)]
    else:
        verdict.checks["worker named"] = len(naming) == len(others)
        verdict.said += sorted({last_line(said[worker.rank]) for worker in others})


def _finished(cell: Cell, made: Attempt, run: Path, whole: Course, verdict: Verdict) -> None:
    """The run reached its end, by the same parameters as one without interruption, and counted what happened."""
    checks = verdict.checks
    checks["finished"] = made.statuses == [0] * WORKERS
    if not checks["finished"]:
        return
    mine = course(made, run)
    same = all(whole.parameters.get(step) == value for step, value in mine.parameters.items())
    checks["bitwise as uninterrupted"] = same and mine.model == whole.model
    spoiled = [fault.step for fault in cell.faults if fault.kind == "nan"]
    at_rest = sum(spoiled.count(step) == WORKERS for step in set(spoiled))  # steps in which nobody had a vote
    checks["counters"] = (mine.abstentions, mine.t) == (len(spoiled) * mine.buckets, cell.steps - at_rest)
    verdict.figures["abstentions"] = mine.abstentions


def names(text: str, rank: int) -> bool:
    """Whether a worker's words name the rank: "rank 2", "ranks 0, 2"."""
    return any(re.search(rf"\b{rank}\b", found) for found in re.findall(r"\branks? (\d+(?:, \d+)*)", text))


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "(nothing)"


def said_by(made: Attempt) -> list[str]:
    """What the workers that failed said last."""
    return [last_line(worker.said()) for worker in made.workers if worker.ended != 0]
