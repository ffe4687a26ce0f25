"""Workers that are killed at counted file operations of saving: the short version of bench/kills.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

BENCH = Path(__file__).resolve().parents[1] / "bench"

# a checkpoint that has its name from the beginning
SABOTAGED = """
import sys
import kills
from dlion.checkpoint.draft import Draft

Draft.folder = property(lambda draft: draft.path)
sys.argv = ["kills", "--kills", "1", "--seed", "6"]
sys.exit(kills.main())
"""


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    paths = os.pathsep.join((str(BENCH), str(BENCH.parent)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=110)


def test_five_kills_lose_nothing() -> None:
    done = run(str(BENCH / "kills.py"), "--kills", "5", "--seed", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 resumable to the bit, 0 lost" in done.stdout


def test_a_checkpoint_that_is_not_atomic_is_found_out() -> None:
    done = run("-c", SABOTAGED)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "step-4 is damaged and has a name" in done.stdout
