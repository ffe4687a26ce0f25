"""Runs the command `dlion` as a user does: in a process of its own."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--workers", "2", "--batch-size", "4", "--log-every", "1", "--device", "cpu")
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_clocked(key: str) -> bool:
    """Whether a field of a record is read from a clock, so that no two runs agree on it."""
    return key == "samples_per_s" or key.endswith(("seconds", "seconds_total"))


PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded here: what runs between fork and exec must need no lock


def end_with_tests() -> None:
    """Called between fork and exec: the command ends when the tests were killed that started it (Linux)."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    told = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "PYTHONFAULTHANDLER": "1"}
    return kept | told


def start(arguments: Sequence[str], folder: Path, module: Sequence[str] = ("-m", "dlion")) -> "subprocess.Popen[str]":
    """The command in `folder`, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *module, *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_tests,
    )


def dlion(arguments: Sequence[str], folder: Path, status: int = 0) -> tuple[str, str]:
    """Run the command to its end, which must be `status`; its output and its errors."""
    process = start(arguments, folder)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == status, (process.returncode, output, errors)
    return output, errors


def await_text(process: "subprocess.Popen[str]", text: str, seconds: float = 60) -> str:
    """Read the command's output until a line holds `text`; all that was read. After so long it must say where it is."""
    assert process.stdout is not None and process.stderr is not None
    late = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGABRT))
    late.start()
    try:
        read = ""
        for line in process.stdout:
            read += line
            if text in line:
                return read
        raise AssertionError(f"ended without {text!r}: {read}{process.stderr.read()}")
    finally:
        late.cancel()


def await_step(process: "subprocess.Popen[str]", step: int) -> None:
    """Read the command's output until it reports `step`."""
    await_text(process, f"step {step}/")


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock measured."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if not is_clocked(key)} for line in lines]


def children(process: "subprocess.Popen[str]") -> list[int]:
    """Process ids of the local ranks, in rank order."""
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]
