"""A process that has ended and been reaped is not signalled: its number may be another process's by then."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from compare_study import STUDY

from dlion.train.compare.attempt import Attempt
from dlion.train.compare.cells import first_stage
from dlion.train.compare.folder import StudyFolder
from dlion.train.supervision import Supervisor


class Ended:
    """As a server that forks leaves one: ended and reaped there, and nobody here has asked since."""

    exitcode = 0
    joined = False

    def kill(self) -> None:
        raise AssertionError("a number that may be another's was signalled")

    def join(self) -> None:
        self.joined = True


def test_a_worker_that_has_ended_is_not_killed() -> None:
    process: Any = Ended()
    nothing: Any = None
    Supervisor(nothing, nothing, 0, process).kill()
    assert process.joined


def test_a_run_that_has_ended_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*told: int) -> None:
        raise AssertionError(f"signalled: {told}")

    monkeypatch.setattr(os, "killpg", refused)
    made = Attempt(first_stage(STUDY)[0], StudyFolder(tmp_path))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        made._process = process
        with pytest.raises(AssertionError, match="signalled"):
            made.kill()
        process.communicate()
        made.kill()
