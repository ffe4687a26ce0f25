"""`dlion train --elastic`: a lighthouse and workers on this machine, each with a supervisor that starts it again; or
one worker, at a lighthouse elsewhere.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import FrameType

import dlion.checkpoint
from dlion.elastic.quorum import LighthouseServer
from dlion.errors import QuorumError
from dlion.train.config import DEFAULT_WORKERS, Settled, TrainConfig, to_flags
from dlion.train.elastic_flags import ElasticFlags
from dlion.train.elastic_worker import FAILED, Task, work
from dlion.train.failure import Failure
from dlion.train.jobs import Place, check
from dlion.train.ranks import REPEAT_SECONDS, choose_device, handle_signals, one_line
from dlion.train.runs import RunFolder, differences

LOOK_SECONDS = 1.0  # between two looks whether the run is finished, or a signal came
STOP_SECONDS = 30.0  # after a signal, for the step at hand and a checkpoint
END_SECONDS = 3.0  # after the run is finished, for workers that were there; others came too late to hear of it
LOOPBACK = "127.0.0.1"


def run(config: TrainConfig, place: Place, flags: ElasticFlags) -> int:
    """Train with elastic workers; the exit status of the command, as of `launch.run`.

    Raises:
        ValueError: a mistake of the user, in one sentence.
        QuorumError: torchft is missing.
    """
    if config.simulate is not None or config.overlap:
        flag = "simulate" if config.simulate is not None else "overlap"
        raise ValueError(f"--{flag} and --elastic contradict each other: give one of them.")
    workers = config.workers or DEFAULT_WORKERS
    if flags.worker is not None and flags.worker >= workers:
        raise ValueError(f"--worker {flags.worker} must be below --workers {workers}: workers count from 0.")
    if flags.min_workers is not None and flags.min_workers > workers:
        raise ValueError(f"--min-workers {flags.min_workers} must be at most --workers {workers}.")
    here = range(workers) if flags.worker is None else [flags.worker]
    device = choose_device(config.device, len(here))
    settled = check(config, workers)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dlion.train.elastic_worker"])
    with _opened(settled, place, flags) as folder, tempfile.TemporaryDirectory(prefix="dlion-") as logs:
        if folder is None:
            return 0
        task = Task(
            flags=to_flags(settled),
            folder=str(folder.path),
            device=device,
            lighthouse=flags.lighthouse or "",
            number=0,
            local_workers=len(here),
            min_workers=flags.min_workers,
            patience=flags.patience,
            log="",
        )
        with _lighthouse(flags, workers) as address:
            tasks = [
                replace(task, lighthouse=address, number=number, log=f"{logs}/worker-{number}.log") for number in here
            ]
            return Supervision(context, folder, tasks, flags.restarts).status()


@contextmanager
def _lighthouse(flags: ElasticFlags, workers: int) -> Iterator[str]:
    if flags.lighthouse is not None:
        yield flags.lighthouse
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        server = LighthouseServer(flags.min_workers or workers // 2 + 1, host=LOOPBACK, join_timeout=flags.patience)
    except QuorumError as error:
        raise ValueError(str(error)) from None
    try:
        yield server.address
    finally:
        server.close()


@contextmanager
def _opened(config: Settled, place: Place, flags: ElasticFlags) -> Iterator[RunFolder | None]:
    """The folder of the run, held against other commands where this one starts all workers."""
    alone = flags.lighthouse is None
    if place.resume is not None:
        folder = RunFolder.existing(place.resume)
    elif not alone and place.name is None:
        raise ValueError("--lighthouse needs --name, the same for all commands: they write into one folder.")
    else:
        folder = _new(config, place, alone)
    other = [text for text in differences(config, folder.read_config()) if not text.startswith("--steps ")]
    if other:
        raise ValueError(f"{folder.path} holds a different run ({other[0]}): only --steps can change on --resume.")
    if place.resume is not None and alone:
        folder.hold()
    try:
        if folder.summary_file.exists():
            if folder.read_summary()["steps"] >= config.steps:
                print(f"{folder.path} is finished: nothing to do (a larger --steps lengthens it).")
                yield None
                return
            folder.summary_file.unlink()
        if place.resume is not None:
            folder.write_config(config)
        yield folder
    finally:
        folder.release()


def _new(config: Settled, place: Place, alone: bool) -> RunFolder:
    if not alone and (place.out / str(place.name) / "config.toml").is_file():
        return RunFolder(place.out / str(place.name))  # another command made it
    folder = RunFolder.create(place.out, place.name, config)
    if not alone:
        folder.release()
    return folder


@dataclass
class Supervisor:
    """Of one worker: starts it, and starts it again when it dies."""

    context: ForkServerContext
    task: Task
    restarts: int
    process: ForkServerProcess | None = None

    def start(self) -> None:
        self.process = self.context.Process(target=work, args=(self.task,), daemon=True)
        self.process.start()

    def ended(self) -> int | None:
        """The exit status of a process that has ended, negative for a signal; None while it lives."""
        return self.process.exitcode if self.process is not None else None

    def start_again(self) -> bool:
        """Whether that may be done once more."""
        if self.restarts == 0:
            return False
        self.restarts -= 1
        self.task = replace(self.task, again=True)
        self.start()
        return True


class Supervision:
    """Of all workers started here, until the run is finished, stopped or lost.

    Args:
        tasks: of the workers. restarts: of each.
    """

    def __init__(self, context: ForkServerContext, folder: RunFolder, tasks: Sequence[Task], restarts: int) -> None:
        self.folder = folder
        self.supervisors = [Supervisor(context, task, restarts) for task in tasks]
        self.signalled = 0
        self._since = 0.0

    def status(self) -> int:
        """Start the workers and wait for the end; the exit status of the command."""
        previous = handle_signals(self._receive)
        try:
            for supervisor in self.supervisors:
                supervisor.start()
            return self._watch()
        finally:
            for supervisor in self.supervisors:
                if supervisor.process is not None:
                    supervisor.process.kill()
                    supervisor.process.join()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _watch(self) -> int:
        until: float | None = None
        living = list(self.supervisors)
        while living:
            wait([s.process.sentinel for s in living if s.process is not None], LOOK_SECONDS)
            finished = self.folder.summary_file.exists()
            if (finished or self.signalled) and until is None:
                until = time.monotonic() + (END_SECONDS if finished else STOP_SECONDS)
            if until is not None and time.monotonic() > until:
                break
            for supervisor in [s for s in living if s.ended() is not None]:
                living.remove(supervisor)
                status = supervisor.ended()
                if status == 0 or finished or self.signalled:
                    continue
                number = supervisor.task.number
                print(f"worker {number} {_how(status)}; it is started again", file=sys.stderr, flush=True)
                if not supervisor.start_again():
                    return self._lost(supervisor)
                living.append(supervisor)
        if self.signalled:
            return 128 + self.signalled
        return 0 if self.folder.summary_file.exists() else FAILED

    def _lost(self, supervisor: Supervisor) -> int:
        log = Path(supervisor.task.log)
        details = log.read_text(errors="replace") if log.exists() else ""
        cause = one_line(details.strip().rpartition("\n")[2] or _how(supervisor.ended())).rstrip(".")
        failure = Failure(f"worker {supervisor.task.number}", cause, details)
        more = failure.keep(self.folder.failure_log)
        found = dlion.checkpoint.latest(self.folder.checkpoints)
        advice = f"; go on with: dlion train --elastic --resume {self.folder.path}" if found else ""
        print(f"dlion: {failure.who} failed too often: {failure.cause} ({more}){advice}", file=sys.stderr)
        return FAILED

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks all workers to stop after a step; a later one ends them at once."""
        if not self.signalled:
            self.signalled, self._since = number, time.monotonic()
            for supervisor in self.supervisors:
                if supervisor.process is not None and supervisor.process.pid is not None and supervisor.ended() is None:
                    os.kill(supervisor.process.pid, signal.SIGTERM if number == signal.SIGHUP else number)
        elif time.monotonic() - self._since > REPEAT_SECONDS:
            raise KeyboardInterrupt


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
