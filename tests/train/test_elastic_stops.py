"""`dlion train` is stopped at counted moments of its start: a clean end, the right status, and nobody left behind."""

import multiprocessing
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

os.environ.setdefault("RUST_LOG", "error")
pytest.importorskip("torchft", reason="elastic workers need torchft: pip install -r requirements/elastic.txt")

from command import TINY

from dlion.cli import main

pytestmark = pytest.mark.processes

ELASTIC = ("elastic_launch.py", "supervision.py", "stop_signals.py", "forkserver.py", "popen_forkserver.py")
FORKS = ("popen_fork.py",)
RUN = ["train", *TINY, "--steps", "100000", "--name", "run"]
AT = [0, 12, 29, 30, 41, 49]  # calls of functions of these files; from 49 on it waits for workers


def stopped_at(moment: int, number: int, folder: Path, counted: Sequence[str], flags: Sequence[str]) -> None:
    """The command in this process, which leads a session; it is sent a signal when functions of these files were called
    `moment` times, and all its processes with it, unless that is SIGKILL.
    """
    os.setsid()
    os.chdir(folder)
    for descriptor, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    calls, leader = [0], os.getpid()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and os.getpid() == leader and os.path.basename(frame.f_code.co_filename) in counted:
            calls[0] += 1
            if calls[0] > moment:
                sys.setprofile(None)
                Path("sent").touch()
                os.kill(os.getpid() if number == signal.SIGKILL else 0, number)

    status = 1
    try:
        sys.setprofile(count)
        status = main([*RUN, *flags])
        sys.setprofile(None)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    server: Any = forkserver
    if server._forkserver._forkserver_pid is not None:  # it would end by itself, after it has imported torch
        os.kill(server._forkserver._forkserver_pid, signal.SIGKILL)
    os._exit(status)


def status_of(moment: int, number: int, folder: Path, counted: Sequence[str], *flags: str) -> int:
    """The exit status of a command that `stopped_at` stops; all its processes have ended then."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dlion.train.elastic_launch", "test_elastic_stops"])
    process = context.Process(target=stopped_at, args=(moment, number, folder, counted, flags))
    process.start()
    process.join(60)
    assert process.exitcode is not None, "it hangs"
    assert (folder / "sent").exists()
    for descriptor in in_session(process.pid):
        assert select.select([descriptor], [], [], 60)[0], "a process is left behind"
        os.close(descriptor)
    return process.exitcode


def in_session(session: int | None) -> list[int]:
    """Descriptors of the processes of a session that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(os.pidfd_open(int(stat.parent.name)))
    return found


@pytest.mark.parametrize("moment", AT)
def test_a_signal_at_any_moment_of_the_start_ends_it_cleanly(moment: int, tmp_path: Path) -> None:
    number = signal.SIGINT if AT.index(moment) % 2 else signal.SIGTERM
    status = status_of(moment, number, tmp_path, ELASTIC, "--elastic")
    errors = (tmp_path / "errors").read_text()
    if status == -signal.SIGTERM:  # nobody listened yet, as nothing was made
        assert errors == "" and not (tmp_path / "runs").exists()
    else:
        assert status == 128 + number, errors
        assert errors.startswith("dlion: ") and errors.count("\n") == 1, errors


@pytest.mark.parametrize(
    ("moment", "counted", "flags"),
    [(49, ELASTIC, ["--elastic"]), (5, FORKS, [])],
    ids=["elastic workers have just begun", "ranks are being forked"],
)
def test_workers_end_when_their_launcher_is_killed_while_it_starts(
    moment: int, counted: Sequence[str], flags: list[str], tmp_path: Path
) -> None:
    assert status_of(moment, signal.SIGKILL, tmp_path, counted, *flags) == -signal.SIGKILL
