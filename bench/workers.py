"""Start one process for each worker, each in its own place, and see them all to their end."""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from links import Place

PORT = 29500  # free for certain: the namespaces were made for these workers
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
SHOWN_LINES = 12  # of the output of a worker that failed


class WorkerError(Exception):
    """A sentence for the user; the lines that the worker wrote follow."""


def environment(places: Sequence[Place], rank: int, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of one worker, as torchrun on one machine of its own would give it."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": places[rank].interface,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **extra,
    }


def run_workers(
    places: Sequence[Place],
    command: Sequence[str],
    seconds: float,
    extra: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> None:
    """Run `command` once in every place, with RANK, WORLD_SIZE and what else torch.distributed reads.

    Rank 0's output is passed through; the others' is kept and shown only if they fail.

    Args:
        places: one for each worker, rank 0 first.
        command: the same for all.
        seconds: limit for all of them together.
        extra: more environment variables.
        folder: where they run; None: here.

    Raises:
        WorkerError: names the first rank that failed, or those that had not ended after `seconds`. The others have
            been ended by then.
    """
    with tempfile.TemporaryDirectory(prefix="dlion-workers-") as kept, ExitStack() as stack:
        logs = [Path(kept) / f"rank-{rank}" for rank in range(len(places))]
        workers: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, workers)
        for rank, place in enumerate(places):
            log = stack.enter_context(logs[rank].open("wb"))
            workers.append(
                subprocess.Popen(
                    # Even if this process is killed, no worker stays behind.
                    ["setpriv", "--pdeathsig", "SIGKILL", *place.enter, *command],
                    cwd=folder,
                    env=environment(places, rank, extra or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else log,
                    stderr=None if rank == 0 else subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is answered here, once
                )
            )
        failed = _first_failure(workers, time.monotonic() + seconds)
        if failed is not None:
            raise WorkerError(_blame(failed, workers[failed].returncode, logs[failed]))
        late = [rank for rank, worker in enumerate(workers) if worker.returncode is None]
        if late:
            raise WorkerError(f"ranks {late} had not ended after {seconds:g} s: raise the limit, or look for a hang.")


def _first_failure(workers: Sequence[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """Wait for all workers; the rank that failed first, None if none did until the deadline."""
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for rank, worker in enumerate(workers):
            handle = os.pidfd_open(worker.pid)
            stack.callback(os.close, handle)
            selector.register(handle, selectors.EVENT_READ, rank)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fd)
                if workers[key.data].wait() != 0:
                    return int(key.data)
    return None


def _blame(rank: int, status: int, log: Path) -> str:
    how = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
    lines = log.read_text(errors="replace").strip().splitlines()[-SHOWN_LINES:]
    where = "its message stands above." if rank == 0 else "its last lines:" if lines else "it wrote nothing."
    return "\n    ".join([f"rank {rank} ended with {how}; {where}", *lines])


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs, with all it has started."""
    sys.stdout.flush()
    running = [worker for worker in workers if worker.poll() is None]
    for worker in running:
        os.killpg(worker.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in running:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
