"""The workers that `dlion train --elastic` starts on this machine: each is watched, and started again when it dies."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from dlion.elastic.quorum import workers_text
from dlion.train.elastic_task import Task
from dlion.train.elastic_worker import work
from dlion.train.failure import Failure
from dlion.train.orphans import FAILED
from dlion.train.ranks import one_line
from dlion.train.runs import RunFolder
from dlion.train.stop_signals import StopSignals, held_back

LOOK_SECONDS = 1.0  # between two looks whether the run is finished
STOP_SECONDS = 30.0  # after a signal, for the step at hand and a checkpoint
END_SECONDS = 3.0  # after the run is finished, for workers that were there; others came too late to hear of it


@dataclass
class Supervisor:
    """Of one worker: starts it, and starts it again when it dies.

    Attributes:
        restarts: how often that may still be done. process: the worker's, once it was started.
    """

    context: ForkServerContext
    task: Task
    restarts: int
    process: ForkServerProcess | None = None

    def start(self) -> None:
        resource_tracker.ensure_running()  # first: starting it lets SIGINT and SIGTERM through again
        with held_back():  # a signal to all processes of the command must not end the server that forks workers
            forkserver.ensure_running()
        process = self.context.Process(target=work, args=(self.task,), daemon=True)
        process.start()
        self.process = process

    def start_again(self) -> None:
        """Once more, which `restarts` must allow."""
        self.restarts -= 1
        self.task = replace(self.task, again=True)
        self.start()

    def ended(self) -> int | None:
        """The exit status of a process that has ended, negative for a signal; None while it lives."""
        return self.process.exitcode if self.process is not None else None

    def send(self, number: int) -> None:
        """Signal the process, if it lives."""
        if self.process is not None and self.process.pid is not None and self.ended() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            if self.ended() is None:  # the number of one that has ended may be another process's by now
                self.process.kill()
            self.process.join()

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    @property
    def has_trained(self) -> bool:
        """Whether one of its processes has taken a step."""
        return Path(self.task.trained).exists()


class Supervision:
    """Of all workers started here, until the run is finished, stopped or lost.

    Args:
        tasks: of the workers started here. restarts: of each. enough: so many of them can go on, if no more are left.
    """

    def __init__(
        self,
        context: ForkServerContext,
        folder: RunFolder,
        tasks: Sequence[Task],
        *,
        restarts: int,
        enough: int,
    ) -> None:
        self.folder = folder
        self.go_on = tasks[0].go_on
        self.workers_in_all: int = tasks[0].flags["workers"]
        self.restarts = restarts
        self.enough = enough
        self.supervisors = [Supervisor(context, task, restarts) for task in tasks]
        self.living: list[Supervisor] = []
        self.given_up: list[int] = []

    def status(self, signals: StopSignals) -> int:
        """Start the workers and wait for the end; the exit status of the command."""
        try:
            self._start(signals)
            return self._watch(signals)
        except KeyboardInterrupt:
            return self._stopped(signals, "all workers were ended at once")
        finally:
            for supervisor in self.supervisors:
                supervisor.kill()

    def _start(self, signals: StopSignals) -> None:
        for supervisor in self.supervisors:
            if signals.number:
                return
            supervisor.start()
            self.living.append(supervisor)
        numbers = workers_text([supervisor.task.number for supervisor in self.supervisors])
        pids = ", ".join(str(supervisor.pid) for supervisor in self.supervisors)
        print(f"{numbers}: process{'es' if len(self.supervisors) > 1 else ''} {pids}", flush=True)

    def _watch(self, signals: StopSignals) -> int:
        until: float | None = None
        told = 0
        while self.living:
            if signals.number and not told:
                if not any(supervisor.has_trained for supervisor in self.supervisors):
                    break  # nothing can be lost, and who waits for the others to start does not hear a signal
                told = signal.SIGTERM if signals.number == signal.SIGHUP else signals.number
                for supervisor in self.living:
                    supervisor.send(told)
            finished = self.folder.summary_file.exists()
            if (finished or told) and until is None:
                until = time.monotonic() + (END_SECONDS if finished else STOP_SECONDS)
            if until is not None and time.monotonic() > until:
                break
            sentinels = [s.process.sentinel for s in self.living if s.process is not None]
            signals.wait_beside(sentinels, LOOK_SECONDS)
            for supervisor in [s for s in self.living if s.ended() is not None]:
                self.living.remove(supervisor)
                if not (supervisor.ended() == 0 or signals.number or self.folder.summary_file.exists()):
                    if not self._replaced(supervisor) and len(self.living) < self.enough:
                        return self._lost()
        return self._end(signals)

    def _replaced(self, supervisor: Supervisor) -> bool:
        """Start a worker that died again, or give it up; says which."""
        number, status = supervisor.task.number, supervisor.ended()
        how = _how(status)
        if supervisor.restarts:
            supervisor.start_again()
            self.living.append(supervisor)
            _say(f"worker {number} {how}; it is started again, as process {supervisor.pid}")
            return True
        self.given_up.append(number)
        log = Path(supervisor.task.log)
        details = log.read_text(errors="replace") if log.exists() else ""
        # who was ended from outside did not say why: what stands last is of something else
        cause = _last_words(details) if status is not None and status > 0 else ""
        failure = Failure(f"worker {number}", f"{how} {cause}".strip(), details)
        often = f"--restarts {self.restarts}"
        _say(
            f"worker {number} {how} and is given up ({often}{f'; {cause}' if cause else ''}; "
            f"{failure.keep(self.folder.failure_log)})"
        )
        if len(self.living) >= self.enough:
            _say(f"going on without it: {workers_text([one.task.number for one in self.living])}")
        return False

    def _lost(self) -> int:
        left, of = len(self.living), len(self.supervisors)
        few = f" and {left} of {of} are left, where {self.enough} are needed" if of > 1 else ""
        _say(f"dlion: {workers_text(self.given_up)} failed too often{few}; go on with: {self.go_on}")
        return FAILED

    def _end(self, signals: StopSignals) -> int:
        stuck = workers_text([supervisor.task.number for supervisor in self.living])
        if self.folder.summary_file.exists():
            if self.given_up:
                _say(f"dlion: finished without {workers_text(self.given_up)}, given up earlier")
            return 128 + signals.number if signals.number else 0
        if signals.number:
            if not any(supervisor.has_trained for supervisor in self.supervisors):
                return self._stopped(signals, "before a step was taken")
            if self.living:
                return self._stopped(signals, f"{stuck} did not within {STOP_SECONDS:g} s and had to be ended")
            return 128 + signals.number
        if len(self.supervisors) < self.workers_in_all and not self.given_up:
            return 0  # they trained to the end; a worker of another command writes the results
        _say(f"dlion: all workers ended, and the results were not written; go on with: {self.go_on}")
        return FAILED

    def _stopped(self, signals: StopSignals, how: str) -> int:
        _say(f"dlion: stopped by {signal.Signals(signals.number).name}: {how}; go on with: {self.go_on}")
        return 128 + signals.number


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _last_words(text: str) -> str:
    """The last line of what a worker wrote that is not one of C++'s stack."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("frame #")]
    return one_line(lines[-1]).rstrip(".") if lines else ""


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
