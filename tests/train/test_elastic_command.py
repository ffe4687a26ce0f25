"""`dlion train --elastic`: workers that are killed and started again, signals, resuming, and a lighthouse elsewhere."""

import json
import os
import select
import signal
import subprocess
from pathlib import Path

import pytest
from command import TINY, await_step, dlion, records, start

os.environ.setdefault("RUST_LOG", "error")
pytest.importorskip("torchft", reason="elastic workers need torchft: pip install -r requirements/elastic.txt")

from dlion.elastic.quorum import LighthouseServer

THREE = ("train", "--elastic", "--workers", "3", *TINY[2:], "--name", "run")


def workers_of(launcher: int) -> list[int]:
    """Process ids of the workers: children of the server that forks them, oldest first."""
    found = []
    for child in _children(launcher):
        found += _children(child)
    return sorted(found)


def await_text(process: "subprocess.Popen[str]", text: str) -> str:
    """Read the command's output until a line holds `text`; all that was read."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if text in line:
            return read
    raise AssertionError(f"ended without {text!r}: {read}")


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_is_killed_comes_back_and_a_stopped_run_goes_on(victim: int, tmp_path: Path) -> None:
    process = start([*THREE, "--steps", "100000", "--eval-every", "100000"], tmp_path)
    await_step(process, 3)
    os.kill(workers_of(process.pid)[victim], signal.SIGKILL)
    said = await_text(process, f"worker {victim} joined at step")
    os.killpg(process.pid, signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, (said, rest, errors)
    assert f"worker {victim} lost at step" in said and "stopped after step" in rest
    assert errors == f"worker {victim} was ended by SIGKILL; it is started again\n"
    run = tmp_path / "runs" / "run"
    done = records(run)[-1]["step"]
    assert [record["step"] for record in records(run)] == list(range(done + 1))
    output, _ = dlion(["train", "--elastic", "--resume", "runs/run", "--steps", str(done + 4)], tmp_path)
    assert "resumed after step" in output
    assert [record["step"] for record in records(run)] == list(range(done + 5))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == done + 4 and summary["checkpoints"] >= 2 and summary["checkpoint_seconds"] > 0


def test_workers_join_a_lighthouse_elsewhere_and_none_outlives_its_launcher(tmp_path: Path) -> None:
    server = LighthouseServer(2)
    try:
        given = ["train", "--elastic", *TINY, "--steps", "100000", "--name", "run", "--lighthouse", server.address]
        first = start([*given, "--worker", "0"], tmp_path)
        second = start([*given, "--worker", "1"], tmp_path)
        await_step(first, 3)
        descriptors = [os.pidfd_open(worker) for one in (first, second) for worker in workers_of(one.pid)]
        assert len(descriptors) == 2
        for one in (first, second):
            one.kill()
            one.communicate(timeout=30)
        for descriptor in descriptors:
            _await_end(descriptor)
    finally:
        server.close()


def _await_end(descriptor: int) -> None:
    """Wait until the process has ended."""
    ready, _, _ = select.select([descriptor], [], [], 20)
    os.close(descriptor)
    assert ready, "a worker outlives its launcher"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lighthouse", "a:1"], "--lighthouse and --worker belong together"),
        (["--min-workers", "4"], "--min-workers 4 must be at most --workers 3"),
        (["--overlap"], "--overlap and --elastic contradict each other"),
    ],
)
def test_mistakes_are_said_in_one_sentence(flags: list[str], said: str, tmp_path: Path) -> None:
    _, errors = dlion([*THREE, *flags], tmp_path, status=2)
    assert said in errors and errors.count("\n") == 1
    _, errors = dlion(["train", "--min-workers", "2"], tmp_path, status=2)
    assert "--min-workers means nothing without --elastic" in errors
