"""From a configuration to running workers: the local ranks that dlion starts itself, or the ranks it finds itself in.

A user's mistake is found here, before a worker starts and before a file is written. While workers run, only
this file knows about signals: it turns Ctrl-C and SIGTERM into one step at which all ranks stop.
"""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dlion.channel import Channel
from dlion.train import loop
from dlion.train.config import DEFAULT_WORKERS, TrainConfig, from_flags, to_flags
from dlion.train.jobs import Job, Place, check, open_run
from dlion.train.ranks import choose_device, join, only_lost_contact

LOOPBACK = "127.0.0.1"
BLAME_SECONDS = 1.0
REPEAT_SECONDS = 1.0
SHUTDOWN_SECONDS = 5
AT_ONCE = -1  # in the place of a signal's number: ranks shall end without another step
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(config: TrainConfig, place: Place) -> int:
    """Train, and return the exit status of the command.

    0: finished; 1: a worker failed; 130, 143, 129: Ctrl-C, SIGTERM or a hang-up ended it after a checkpoint.

    Raises:
        ValueError: a mistake of the user, in one sentence; nothing was written.
    """
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _as_found_rank(config, place)
    return _with_own_ranks(config, place)


def _with_own_ranks(config: TrainConfig, place: Place) -> int:
    workers = config.workers or DEFAULT_WORKERS
    device = choose_device(config, workers)
    settled = check(config, workers)
    # Forked workers share the loaded data and start at once; a CUDA context does not survive a fork.
    method = "fork" if device == "cpu" else "spawn"
    signalled = multiprocessing.get_context(method).Value("i", 0, lock=False)
    previous = _handle_signals(_remember(signalled, os.getpid()))
    try:
        job = open_run(settled, place)
        if job is None:
            return 0
        try:
            with tempfile.TemporaryDirectory(prefix="dlion-") as logs:
                try:
                    elastic_launch(_launch_config(workers, method, logs), _own_rank)(job, device, signalled)
                except ChildFailedError as error:
                    print(f"dlion: {_blame(error, job, Path(logs))}", file=sys.stderr)
                    return 1
        finally:
            job.folder.release()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 128 + signalled.value if signalled.value else 0


def _launch_config(workers: int, method: str, logs: str) -> LaunchConfig:
    for noisy in ("torch.multiprocessing.spawn", "torch.distributed.elastic"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL + 1)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id="dlion",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.1,
        start_method=method,
        signals_to_handle="SIGQUIT",  # the others are ours
        shutdown_timeout=SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ERR),
    )


def _own_rank(job: Job, device: Literal["cpu", "cuda"], signalled: Any) -> None:
    """What each local rank runs. The launcher alone answers to Ctrl-C; it ends ranks with SIGTERM."""
    launcher = os.getppid()
    _name_no_host()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        # The kernel sends SIGINT too when the launcher was killed: then nobody is left to report to.
        if os.getppid() != launcher:
            os._exit(1)

    def on_terminate(number: int, frame: FrameType | None) -> None:
        # `timeout`, systemd and Slurm send SIGTERM to all processes of a command. After AT_ONCE it is the launcher's.
        if signalled.value == AT_ONCE:
            os._exit(128 + number)
        signalled.value = signalled.value or number

    signal.signal(signal.SIGINT, on_interrupt)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        loop.train(job, join(device, lambda: int(signalled.value)))
        dist.destroy_process_group()
    except Exception as error:
        if only_lost_contact(error):
            time.sleep(BLAME_SECONDS)  # the launcher should see first the rank that really failed
        raise


def _name_no_host() -> None:
    """Meet the other ranks by interface and number.

    A fork taken while some thread of the launcher looked up a name leaves the C library's resolver locked in the
    child, and there the next look-up would wait for ever.
    """
    for _, interface in socket.if_nameindex():
        if interface in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _as_found_rank(config: TrainConfig, place: Place) -> int:
    size, rank = (os.environ[name].strip() for name in ("WORLD_SIZE", "RANK"))
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise ValueError(
            f"the launcher set RANK={rank} and WORLD_SIZE={size}, and a rank must be one of 0 to WORLD_SIZE - 1: "
            "unset both to let dlion start its own workers."
        )
    workers = int(size)
    if config.workers not in (None, workers):
        raise ValueError(
            f"--workers {config.workers} contradicts the launcher, which started {workers}: leave --workers out."
        )
    device = choose_device(config, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    try:
        number = _train_among_found(config, place, device)
        dist.destroy_process_group()
    except (RuntimeError, OSError) as error:
        if only_lost_contact(error):
            time.sleep(BLAME_SECONDS)
        print(f"dlion: rank {os.environ['RANK']} failed: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return 1
    # A thread of a process group that lives on while the interpreter is taken down aborts the process now and
    # then (seen with gloo), and the launcher would call a finished run a failure. Forked ranks end like this too.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + number if number else 0)


def _train_among_found(config: TrainConfig, place: Place, device: Literal["cpu", "cuda"]) -> int:
    """Returns the number of the signal that stopped training, 0 for none."""
    received: list[int] = []
    ranks = join(device, lambda: received[0] if received else 0)
    _handle_signals(
        lambda number, frame: received.append(number)
    )  # not before: a rank that waits for others can be ended
    job = _agree_on_run(config, place, ranks.channel)
    if job is not None:
        loop.train(job, ranks)
    return ranks.stop.signal


def _agree_on_run(config: TrainConfig, place: Place, channel: Channel) -> Job | None:
    """Every rank checks what it was asked for, rank 0 opens the run folder; a mistake of one is told by all."""
    settled = from_flags(_outcomes(channel, lambda: to_flags(check(config, channel.size)))[0])

    def open_on_rank_0() -> dict[str, Any] | None:
        job = open_run(settled, place) if channel.rank == 0 else None
        return job.to_json() if job else None

    told = _outcomes(channel, open_on_rank_0)[0]
    return Job.from_json(told) if told else None


def _outcomes(channel: Channel, act: Callable[[], Any]) -> list[Any]:
    """What `act` returned on each rank (JSON).

    Raises:
        ValueError: on every rank, the mistake of the first rank that made one.
    """
    try:
        answer = {"value": act()}
    except (ValueError, OSError) as error:
        answer = {"mistake": _one_line(error)}
    answers = channel.gather_json(answer)
    mistakes = [answer["mistake"] for answer in answers if "mistake" in answer]
    if mistakes:
        raise ValueError(mistakes[0])
    return [answer["value"] for answer in answers]


def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    return {number: signal.signal(number, handler) for number in SIGNALS}


def _remember(signalled: Any, launcher: int) -> Callable[[int, FrameType | None], None]:
    """The launcher's handler: the first signal asks the ranks to stop, a later one ends them at once.

    A forked rank has it too, until it sets its own. Some tools send one Ctrl-C twice within milliseconds.
    """
    first = [0.0]

    def handle(number: int, frame: FrameType | None) -> None:
        if not first[0]:  # whatever `signalled` says: a rank may have been sent the same signal earlier
            first[0] = time.monotonic()
            signalled.value = signalled.value or number
        elif os.getpid() == launcher and time.monotonic() - first[0] > REPEAT_SECONDS:
            signalled.value = AT_ONCE
            raise KeyboardInterrupt

    return handle


def _blame(error: ChildFailedError, job: Job, logs: Path) -> str:
    """One sentence about the rank that failed; what it wrote to stderr goes to the run's failure.log."""
    rank, failure = error.get_first_failure()
    message: Any = failure.message
    details = "".join(
        path.read_text(errors="replace") for path in logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log")
    )
    if isinstance(message, dict):
        cause = _one_line(message["message"])
        details += message["extraInfo"]["py_callstack"]
    elif failure.exitcode < 0:
        cause = f"it was ended by {failure.signal_name()}"
    else:
        cause = f"it exited with status {failure.exitcode}"
    log = job.folder.failure_log
    try:
        log.write_text(f"rank {rank}: {cause}\n\n{details}", encoding="utf-8", errors="backslashreplace")
        more = f"more in {log}"
    except OSError as problem:  # the folder is gone or its disk full: often the reason itself
        more = f"{log} could not be written: {problem.strerror}"
    saved = (
        f"; go on with: dlion train --resume {job.folder.path}" if any(job.folder.checkpoints.glob("step-*")) else ""
    )
    return f"rank {rank} failed: {cause.rstrip('.')} ({more}){saved}"


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:500]
