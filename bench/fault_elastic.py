"""Elastic workers that are killed and come back: `dlion train --elastic` with faults, and what its survivors say of it.

The command runs in this process, which is the launcher: its supervisors start every worker from a server that has
imported torch once, and hear from it how each one ended.
"""

import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import fault_elastic_worker
from fault_injection import events
from fault_plan import SAVE_EVERY, WORKERS, Cell, Fault
from fault_runs import FLAGS, LIMIT, NotFiredError

from dlion.cli import main as dlion
from dlion.train import supervision

Record = dict[str, Any]

WHOLE_WITHIN = 20  # steps after its return, in which a worker votes again
LOST_AT_MOST = 1  # steps of a survivor
PATIENCE = "20"  # seconds of the command for a worker that lives and does not answer


class LateError(Exception):
    """The command had not ended after LIMIT seconds."""


@dataclass
class Elastics:
    """What one elastic command did.

    Attributes:
        status: of the command. output: of the launcher and of who led.
        ends: (worker, exit status) of every process that ended, as the supervisors heard it.
        lives: of each worker, the lines of each of its processes, in the order of their beginning.
    """

    folder: Path
    status: int
    output: str
    ends: list[tuple[int, int]]
    lives: list[list[list[Record]]]


def run_elastic(cell: Cell, folder: Path) -> Elastics:
    """Run the command of a cell, with its faults."""
    folder.mkdir(parents=True)
    planned = fault_elastic_worker.Planned(folder, cell.faults)
    command = [*FLAGS, "--elastic", "--workers", str(WORKERS), "--patience", PATIENCE, "--steps", str(cell.steps)]
    command += ["--save-every", str(SAVE_EVERY), *cell.flags, "--out", str(folder), "--name", "run"]
    output = folder / "output.txt"
    with _supervised(planned) as ends, _written_to(output), _limited():
        try:
            status = dlion(command)
        except LateError:
            status = -1
    if status > 128:  # the command answered a signal that was meant for all of this
        raise SystemExit(status)
    return Elastics(folder, status, output.read_text(errors="replace"), ends, _lives(folder))


@contextmanager
def _supervised(planned: fault_elastic_worker.Planned) -> Iterator[list[tuple[int, int]]]:
    """Within, every worker's process has its faults, and the ends of all processes are collected."""
    work, ended = supervision.work, supervision.Supervisor.ended
    context = multiprocessing.get_context("forkserver")
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))  # or the server does not find what it preloads
    preload = context.set_forkserver_preload
    ends: dict[int, tuple[int, int]] = {}

    def noted(self: Any) -> int | None:
        status: int | None = ended(self)
        if status is not None:
            ends[self.process.pid] = (self.task.number, status)
        return status

    supervision.work = planned.work  # type: ignore[assignment]
    supervision.Supervisor.ended = noted  # type: ignore[method-assign]
    context.set_forkserver_preload = lambda names: preload([*names, "fault_elastic_worker", "__main__"])  # type: ignore
    kept: list[tuple[int, int]] = []
    try:
        yield kept
    finally:
        supervision.work, supervision.Supervisor.ended = work, ended  # type: ignore[method-assign]
        del context.set_forkserver_preload
        kept += ends.values()


@contextmanager
def _written_to(file: Path) -> Iterator[None]:
    """Within, what this process and its children say goes to the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.dup(1), os.dup(2)]
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for target in (1, 2):
            os.dup2(handle, target)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for target, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, target)
        for each in (*before, handle):
            os.close(each)


@contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _lives(folder: Path) -> list[list[list[Record]]]:
    lives = []
    for number in range(WORKERS):
        mine: dict[int, list[Record]] = {}
        for event in events(folder / f"events-{number}.jsonl"):
            mine.setdefault(event["pid"], []).append(event)
        lives.append(list(mine.values()))
    return lives


def prove_kills(made: Elastics, faults: Sequence[Fault]) -> list[str]:
    """How it is known of each kill that it happened.

    Raises: NotFiredError names the first that did not.
    """
    for fault in faults:
        first = made.lives[fault.rank][0] if made.lives[fault.rank] else []
        if not any(event["event"] == "fault" and event["name"] == fault.name for event in first):
            raise NotFiredError(f"{fault.name}: worker {fault.rank} never came to it; see {made.folder}.")
        if (fault.rank, -signal.SIGKILL) not in made.ends:
            raise NotFiredError(f"{fault.name}: no process of the worker ended by SIGKILL, but {made.ends}.")
    return ["its supervisor heard: signal 9"] * len(faults)


def run_cell(cell: Cell, folder: Path) -> Record:
    """Run the cell; what was seen of it, as JSON.

    Raises: NotFiredError when a fault did not happen.
    """
    began = time.monotonic()
    made = run_elastic(cell, folder)
    proof = prove_kills(made, cell.faults)
    checks: dict[str, bool] = {"finished": made.status == 0}
    figures: Record = {"status": made.status}
    killed = {fault.rank for fault in cell.faults}
    survivors = [made.lives[number][0] for number in range(WORKERS) if number not in killed and made.lives[number]]
    _same(made, cell.steps, checks)
    checks["survivors live"] = len(survivors) == WORKERS - len(killed) and not any(
        len(made.lives[number]) > 1 for number in range(WORKERS) if number not in killed
    )
    lost = [_lost(life) for life in survivors]
    checks["lost at most 1 step"] = all(number <= LOST_AT_MOST for number in lost)
    figures["lost"] = max(lost, default=0)
    if killed:
        figures["stall"] = round(max(_stall(life) for life in survivors), 2)
    if cell.returns:
        whole = [_whole_after(made.lives[number], survivors) for number in killed]
        figures["whole after"] = max((steps for steps in whole if steps is not None), default=None)
        figures["away"] = round(max(_away(made.lives[number]) for number in killed), 2)
        checks["whole again"] = all(steps is not None and steps <= WHOLE_WITHIN for steps in whole)
    figures["loss"] = _final_loss(folder / "run")
    said = [line for line in made.output.splitlines() if "lost" in line or "joined" in line or "dlion:" in line]
    record = cell.described() | {"proof": proof, "ok": all(checks.values()), "checks": checks}
    return record | {**figures, "said": said[-4:], "seconds": round(time.monotonic() - began, 1)}


def _steps(life: Sequence[Record]) -> list[Record]:
    return [event for event in life if event["event"] == "step"]


def _same(made: Elastics, last: int, checks: dict[str, bool]) -> None:
    """Equal parameters after each step on all workers that did it, and all that live at the end reach the last."""
    found: dict[int, set[tuple[int, int]]] = {}
    for event in (e for lives in made.lives for life in lives for e in _steps(life)):
        found.setdefault(event["step"], set()).add((event["parameters"], event["t"]))
        checks["finite"] = checks.get("finite", True) and event["finite"]
    checks["equal replicas"] = all(len(each) == 1 for each in found.values())
    checks["all steps"] = sorted(found) == list(range(1, last + 1)) and all(t == last for _, t in found.get(last, ()))


def _lost(life: Sequence[Record]) -> int:
    """Gradients of a survivor that no verdict counted: made and not voted with, or made anew for the same step."""
    gradients = sum(event["event"] == "batch" for event in life)
    return gradients - sum(event["voted"] for event in _steps(life))


def _stall(life: Sequence[Record]) -> float:
    """The longest time between two steps, less the usual one."""
    at = [event["at"] for event in _steps(life)]
    gaps = [after - before for before, after in pairwise(at)]
    return max(gaps) - statistics.median(gaps) if gaps else 0.0


def _whole_after(lives: Sequence[Sequence[Record]], survivors: Sequence[Sequence[Record]]) -> int | None:
    """Steps of the others from a worker's return, when it asks to take part, to the first step that it votes in.

    None: it did not come to that.
    """
    if len(lives) < 2:
        return None
    came = next((event["at"] for event in lives[1] if event["event"] == "entered"), None)
    voted = next((event["step"] for event in _steps(lives[1]) if event["voted"]), None)
    if came is None or voted is None:
        return None
    before = [event["step"] for life in survivors for event in _steps(life) if event["at"] < came]
    return int(voted) - max(before, default=0)


def _away(lives: Sequence[Sequence[Record]]) -> float:
    """Seconds between a worker's death and its next process' first step."""
    again = _steps(lives[1]) if len(lives) > 1 else []
    return again[0]["at"] - lives[0][-1]["at"] if again else float("inf")


def _final_loss(run: Path) -> float | None:
    file = run / "summary.json"
    return json.loads(file.read_text())["val_loss"] if file.exists() else None
