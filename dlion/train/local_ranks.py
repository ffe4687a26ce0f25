"""Ranks on this machine, as forks or children of this process: started, signalled, and blamed when one fails."""

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dlion.train.failure import Failure
from dlion.train.orphans import end_with_launcher
from dlion.train.ranks import BLAME_SECONDS, REPEAT_SECONDS, Ranks, handle_signals, join, one_line, only_lost_contact

LOOPBACK = "127.0.0.1"
SHUTDOWN_SECONDS = 5
AT_ONCE = -1  # in the place of a signal's number: ranks shall end without another step


@dataclass(frozen=True)
class LocalRanks:
    """Ranks that can be started; signals are listened to already."""

    workers: int
    device: Literal["cpu", "cuda"]
    method: Literal["fork", "spawn"]
    signalled: Any

    def run(self, work: Callable[[Ranks], None]) -> Failure | None:
        """Run `work` on every rank; it must be picklable where ranks are spawned. None when all went well."""
        with tempfile.TemporaryDirectory(prefix="dlion-") as logs:
            try:
                launch = elastic_launch(_launch_config(self.workers, self.method, logs), _own_rank)
                launch(work, self.device, self.signalled)
            except ChildFailedError as error:
                return _blame(error, Path(logs))
        return None

    @property
    def status(self) -> int:
        """The exit status when no rank failed: 0, or 128 + the number of the signal that stopped the ranks."""
        return 128 + int(self.signalled.value) if self.signalled.value else 0


@contextmanager
def local_ranks(workers: int, device: Literal["cpu", "cuda"]) -> Iterator[LocalRanks]:
    """Listen to signals as long as the context lasts; within it, ranks can be run."""
    # Forked workers share the loaded data and start at once; a CUDA context does not survive a fork.
    method: Literal["fork", "spawn"] = "fork" if device == "cpu" else "spawn"
    signalled = multiprocessing.get_context(method).Value("i", 0, lock=False)
    previous = handle_signals(_remember(signalled, os.getpid()))
    try:
        yield LocalRanks(workers, device, method, signalled)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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


def _own_rank(work: Callable[[Ranks], None], device: Literal["cpu", "cuda"], signalled: Any) -> None:
    """What each local rank runs. The launcher alone answers to Ctrl-C; it ends ranks with SIGTERM."""
    end_with_launcher()
    _name_no_host()

    def on_terminate(number: int, frame: FrameType | None) -> None:
        # `timeout`, systemd and Slurm send SIGTERM to all processes of a command. After AT_ONCE it is the launcher's.
        if signalled.value == AT_ONCE:
            os._exit(128 + number)
        signalled.value = signalled.value or number

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        work(join(device, lambda: int(signalled.value)))
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


def _blame(error: ChildFailedError, logs: Path) -> Failure:
    rank, failure = error.get_first_failure()
    message: Any = failure.message
    details = "".join(
        path.read_text(errors="replace") for path in logs.glob(f"*/attempt_*/{failure.local_rank}/stderr.log")
    )
    if isinstance(message, dict):
        cause = one_line(message["message"])
        details += message["extraInfo"]["py_callstack"]
    elif failure.exitcode < 0:
        cause = f"it was ended by {failure.signal_name()}"
    else:
        cause = f"it exited with status {failure.exitcode}"
    return Failure(f"rank {rank}", cause.rstrip("."), details)
