"""One cell under way: a `dlion train` in a process of its own, continued where an earlier attempt stopped."""

import os
import shutil
import signal
import subprocess
import sys
import time

from dlion.train.compare.cells import Cell
from dlion.train.compare.folder import StudyFolder
from dlion.train.runs import RunFolder

GRACE_SECONDS = 30.0  # for a last step and a checkpoint
_LAUNCHERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class CellError(Exception):
    """A cell crashed: why, in one sentence."""


class Attempt:
    """From its start until `done`. An earlier attempt that outlived its `dlion compare` is awaited, not repeated."""

    def __init__(self, cell: Cell, folder: StudyFolder) -> None:
        self.cell = cell
        self.run = RunFolder(folder.runs / cell.name)
        self.log = folder.logs / f"{cell.name}.log"
        self.started = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._resumed = False
        self._stopped_at: float | None = None

    def done(self) -> bool:
        """Whether its run folder holds a finished run. To be asked again and again: it starts what must be started.

        Raises:
            CellError: the command failed.
        """
        if self._process is None:
            return self._begin()
        status = self._process.poll()
        if status is None:
            self._kill_when_late()
            return False
        if self.stopping:
            return self.run.summary_file.exists()
        if status == 0 and self.run.summary_file.exists():
            return True
        if _is_held(self.run):  # by an earlier attempt that was quicker to make its folder
            self._process = None
            return False
        if self._resumed:  # what the earlier attempt left may be of no use
            shutil.rmtree(self.run.path)
            return self._begin()
        raise CellError(f"{self.cell.words}: dlion train ended with status {status}: {self._last_words()} ({self.log})")

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped_at is not None

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more."""
        return self._process is None or self._process.poll() is not None

    def stop(self) -> None:
        """Ask it to write a checkpoint and end; it is killed if that takes too long."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            if self._process is not None:
                self._process.terminate()

    def kill(self) -> None:
        """End it and its workers at once."""
        if self._process is not None and not self.over:  # else its number may be another's by now
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()

    def step(self) -> int:
        """The last step that it has recorded."""
        try:
            last = self.run.metrics_file.read_bytes()[-2000:].split(b"\n")[-2]
            return int(last.partition(b'"step": ')[2].partition(b",")[0] or 0)
        except (OSError, IndexError, ValueError):
            return 0

    def _begin(self) -> bool:
        if self.stopping:
            return False
        if _is_held(self.run):
            return False
        if self.run.summary_file.exists():
            return True
        self._resumed = any(self.run.checkpoints.glob("step-*"))
        if not self._resumed:
            shutil.rmtree(self.run.path, ignore_errors=True)
        self._process = self._start()
        return False

    def _start(self) -> "subprocess.Popen[bytes]":
        place = ["--name", self.run.path.name, "--out", str(self.run.path.parent)]
        what = ["--resume", str(self.run.path)] if self._resumed else [*self.cell.arguments, *place]
        self.log.parent.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS_OWN}
        with self.log.open("ab" if self._resumed else "wb") as output:
            output.write(f"dlion train {' '.join(what)}\n".encode())
            output.flush()
            # A session of its own: Ctrl-C reaches it through this process alone, which then waits for a checkpoint.
            return subprocess.Popen(
                [sys.executable, "-m", "dlion", "train", *what],
                env=environment | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _kill_when_late(self) -> None:
        if self._stopped_at is not None and time.monotonic() - self._stopped_at > GRACE_SECONDS:
            self.kill()

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[1:]
        return lines[-1].removeprefix("dlion: ") if lines else "it said nothing"


def _is_held(run: RunFolder) -> bool:
    """Whether a command still trains in the folder."""
    try:
        run.hold()
    except ValueError:
        return True
    except FileNotFoundError:
        return False
    run.release()
    return False
