"""Workers as children of this process: forked, each in its place, watched through waitpid, never left behind."""

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from delay_switch import enter
from links import Place
from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG = 1
CHANGES = os.WNOHANG | os.WUNTRACED | os.WCONTINUED


@dataclass
class Worker:
    """A child process.

    Attributes:
        ended: how, as `os.waitstatus_to_exitcode` says it: a status, or minus the number of a signal; None: it runs.
        ended_at, stopped_at: on the clock time.monotonic(), which all processes of a machine share.
        stops: how often it was seen stopped.
    """

    rank: int
    pid: int
    output: Path
    ended: int | None = None
    ended_at: float = 0.0
    stopped_at: float = 0.0
    stops: int = 0
    stopped: bool = False

    def said(self) -> str:
        """What it wrote to standard output and standard error."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


class Team:
    """All children that one run has."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []

    def start(self, rank: int, work: Callable[[], int], output: Path, environment: Mapping[str, str]) -> Worker:
        """Fork a child that does `work` and ends with the status that it returns."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _become_worker(parent, work, output, environment)
        with suppress(OSError):  # it has done so itself and may have ended
            os.setpgid(pid, pid)
        worker = Worker(rank, pid, output)
        self.workers.append(worker)
        return worker

    def changes(self, deadline: float) -> Iterator[Worker]:
        """Each worker that ended, was stopped or goes on, as it happens, until all have ended or time is up."""
        while any(worker.ended is None for worker in self.workers):
            yield from self._changed()
            left = deadline - time.monotonic()
            if left <= 0 or all(worker.ended is not None for worker in self.workers):
                return
            signal.sigtimedwait([signal.SIGCHLD], min(left, 1.0))

    def _changed(self) -> Iterator[Worker]:
        for worker in [each for each in self.workers if each.ended is None]:
            pid, status = os.waitpid(worker.pid, CHANGES)
            if not pid:
                continue
            now = time.monotonic()
            if os.WIFSTOPPED(status):
                worker.stopped, worker.stopped_at, worker.stops = True, now, worker.stops + 1
            elif os.WIFCONTINUED(status):
                worker.stopped = False
            else:
                worker.ended, worker.ended_at, worker.stopped = os.waitstatus_to_exitcode(status), now, False
            yield worker

    def end(self) -> None:
        """Kill who is left, with all that it has started."""
        for worker in self.workers:
            if worker.ended is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.ended = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])


@contextmanager
def team() -> Iterator[Team]:
    """A team whose changes can be waited for, and of which nobody is left afterwards."""
    made = Team()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        yield made
    finally:
        made.end()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_worker(parent: int, work: Callable[[], int], output: Path, environment: Mapping[str, str]) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (written, 1), (written, 2)):
            os.dup2(source, target)
        os.environ.update(environment)
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


@contextmanager
def meeting_point(place: Place | None, folder: Path) -> Iterator[Mapping[str, str]]:
    """A store in a process of its own, as a launcher keeps it, so that it outlives every worker.

    Args:
        place: the namespace that it is in; None: here.
        folder: for its output.

    Yields:
        The variables by which workers find it.
    """
    address = place.address if place else LOOPBACK
    ours, theirs = socket.socketpair()

    def keep() -> int:
        ours.close()
        if place:
            enter(place.namespace)
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        theirs.sendall(str(store.port).encode())
        theirs.recv(1)  # until the other end is closed
        return 0

    with team() as keeper, ours:
        keeper.start(-1, keep, folder / "store.txt", {})
        theirs.close()
        ours.settimeout(30)
        port = ours.recv(10).decode()
        if not port:
            raise RuntimeError(f"the store of the workers did not start: see {folder / 'store.txt'}")
        yield {"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def environment(rank: int, workers: int, places: Sequence[Place]) -> dict[str, str]:
    """What a launcher with one worker on each machine would set."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": places[rank].interface if places else "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
