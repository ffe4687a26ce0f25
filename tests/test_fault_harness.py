"""Guards bench/faults.py: its plans, that a fault which does not happen is its own failure, and the short plan."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fault_injection
import fault_table
import faults
import pytest
import torch
from fault_checks import names
from fault_injection import Events, Injector, events
from fault_plan import PHASES, SAVE_EVERY, Fault, cells
from fault_processes import Worker, team
from fault_runs import Attempt, NotFiredError, proofs

BENCH = Path(fault_injection.__file__).parent


def harness(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "faults.py"), *arguments]
    paths = os.pathsep.join(filter(None, [str(BENCH.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)


def injector(folder: Path, *faults: Fault) -> Injector:
    return Injector(faults, Events(folder / "events"), folder)


def written(folder: Path) -> list[str]:
    return [event["name"] for event in events(folder / "events") if event["event"] == "fault"]


# ---- plans


def test_a_plan_is_a_function_of_its_seed() -> None:
    first, again, other = (list(cells("static", seed)) for seed in (3, 3, 4))
    assert first == again != other
    assert len({cell.name for cell in first}) == len(first)


def test_the_static_plan_has_every_fault_in_every_phase() -> None:
    planned = {(fault.kind, fault.phase) for cell in cells("static", 0) for fault in cell.faults}
    wanted = {(kind, phase) for kind in ("kill", "stop", "pause") for phase in PHASES}
    assert planned == wanted | {("full", "saving"), ("full", "apply"), ("nan", "batch"), ("slow", "always")}


def test_a_soak_ends_a_run_once_and_last() -> None:
    for cell, _ in zip(cells("soak", 1), range(200), strict=False):
        assert all(fault.kind in ("nan", "pause", "slow") for fault in cell.faults[:-1])
        assert all(1 <= fault.step <= cell.steps for fault in cell.faults)


def test_what_has_finished_is_not_repeated() -> None:
    options = faults.parse(["--only", "static", "--runs", "3"])
    first, second, third = faults.chosen(options, [])
    record = second.described() | {"seed": 0, "ok": False}
    assert list(faults.chosen(options, [json.loads(json.dumps(record))])) == [first, third]
    assert len(list(faults.chosen(options, [record | {"seed": 1}, record | {"steps": 5}]))) == 3


# ---- a fault happens once, at its step and phase


def test_a_batch_is_spoiled_at_its_step_alone(tmp_path: Path) -> None:
    inject = injector(tmp_path, Fault("nan", 0, 3, "batch"))
    inputs = torch.ones(2, 2)
    assert [bool(inject.spoil(inputs, step).isnan().all()) for step in (2, 3, 3, 4)] == [False, True, False, False]
    assert written(tmp_path) == ["nan-rank0-step3-batch"]


def test_a_fault_of_saving_waits_for_its_file_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    inject = injector(tmp_path, Fault("kill", 0, 2, "saving", 2))
    inject.end(1)
    inject.operate()
    inject.operate()
    inject.end(2)
    inject.operate()
    inject.end(3)  # the checkpoint is written beside the steps that follow
    assert not sent
    inject.operate()
    assert sent == [signal.SIGKILL] and written(tmp_path) == ["kill-rank0-step2-saving-op2"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_the_line_is_there_before_the_kill(tmp_path: Path) -> None:
    def work() -> int:
        injector(tmp_path, Fault("kill", 0, 1, "ballots")).begin(1)
        return 0

    with team() as here:
        worker = here.start(0, work, tmp_path / "output", {})
        changed = list(here.changes(float("inf")))
    assert changed == [worker] and worker.ended == -signal.SIGKILL
    assert written(tmp_path) == ["kill-rank0-step1-ballots"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_stop_is_seen_and_undone(tmp_path: Path) -> None:
    def work() -> int:
        injector(tmp_path, Fault("pause", 0, 1, "ballots")).begin(1)
        return 7

    with team() as here:
        worker = here.start(0, work, tmp_path / "output", {})
        for changed in here.changes(float("inf")):
            if changed.stopped:
                os.kill(changed.pid, signal.SIGCONT)
    assert (worker.stops, worker.ended) == (1, 7)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_nobody_is_left_of_a_team(tmp_path: Path) -> None:
    with team() as here:
        worker = here.start(0, lambda: signal.pause() or 0, tmp_path / "output", {})
    assert worker.ended == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


# ---- what is no proof


def attempt(status: int | None, lines: list[dict[str, Any]], stops: int = 0) -> Attempt:
    worker = Worker(0, 1, Path("/nowhere"), ended=status, stops=stops)
    return Attempt(Path("/nowhere"), [worker], [lines])


KILL, STOP = Fault("kill", 0, 9, "apply"), Fault("stop", 0, 9, "apply")
FULL, SLOW = Fault("full", 0, 8, "saving"), Fault("slow", 0, 1, "always")


def line(fault: Fault, event: str = "fault", **facts: Any) -> dict[str, Any]:
    return {"event": event, "name": fault.name, **facts}


@pytest.mark.parametrize(
    ("fault", "made", "said"),
    [
        (KILL, attempt(0, []), "never came to it"),
        (KILL, attempt(-9, []), "never came to it"),
        (KILL, attempt(1, [line(KILL)]), "ended with 1, not by SIGKILL"),
        (STOP, attempt(1, [line(STOP)]), "never saw the worker stopped"),
        (FULL, attempt(1, [line(FULL)]), "the disk was not full"),
        (FULL, attempt(1, [line(FULL), line(FULL, "filled", errno=errno.EFBIG)]), "the disk was not full"),
        (SLOW, attempt(0, []), "no packet was held back"),
    ],
)
def test_a_fault_that_is_not_proved_fails_the_harness(fault: Fault, made: Attempt, said: str) -> None:
    with pytest.raises(NotFiredError, match=said):
        proofs(made, [fault])


def test_proved_faults_pass() -> None:
    assert proofs(attempt(-9, [line(KILL)]), [KILL]) == ["waitpid: signal 9"]
    assert proofs(attempt(1, [line(STOP)], stops=1), [STOP]) == ["waitpid: stopped"]
    assert proofs(attempt(1, [line(FULL), line(FULL, "filled", errno=errno.ENOSPC)]), [FULL])


def test_tables_count_what_held() -> None:
    kill = {"faults": [{"kind": "kill", "phase": "apply"}], "proof": ["x"], "naming": 3, "others": 3}
    kill |= {"seconds to end": 1.5, "checks": {"finished": True}, "ok": True}
    broken = kill | {"naming": 1, "checks": {"finished": False}, "ok": False}
    table = fault_table.of_kinds([kill, broken])
    assert "| `kill -9` | during apply | 2 | 1 | 4 of 6 | 1.5 s (median 1.5) | finished |" in table
    run = {"cell": "e", "faults": [{"phase": "apply"}], "checks": {"finished": True, "equal replicas": True}}
    runs = [run | {"lost": lost, "stall": stall, "ok": True} for lost, stall in ((0, 2.0), (1, 4.0))]
    assert "| during apply | 2 | 2 | 2 | at most 1 | 3.0 s | 4.0 s |" in fault_table.of_kills(runs)


def test_a_worker_is_named_by_its_number() -> None:
    assert names("rank 0 waited for rank 2", 2) and names("ranks 1, 2 did not come", 2)
    assert not names("rank 12 did not come after 2 s", 2)


# ---- whole


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_plan_whose_fault_never_happens_fails(tmp_path: Path) -> None:
    done = harness("--only", "short", "--runs", "1", "--at-step", "99", "--results", str(tmp_path))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "a fault did not happen: nan-rank" in done.stderr
    assert not (tmp_path / "short.jsonl").exists()


@pytest.mark.processes
@pytest.mark.timeout(300)  # six commands of four workers: 25 s where nothing else runs
def test_the_short_plan_holds(tmp_path: Path) -> None:
    done = harness("--only", "short", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(text) for text in (tmp_path / "short.jsonl").read_text().splitlines()]
    assert records and all(record["ok"] and record["proof"] for record in records)
    killed = records[0]
    assert killed["faults"][-1]["kind"] == "kill" and killed["resumed after"] in (SAVE_EVERY, 2 * SAVE_EVERY)
    assert killed["naming"] == killed["others"] == 3
