"""A small Ray of one machine for tests: nothing of it is in the user's folders, on a network, or there afterwards."""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # which go to the internet
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "200",  # and not 60, where there is other work on the machine
    "OMP_NUM_THREADS": "1",
}
OBJECT_STORE = 80 * 2**20  # bytes, about the least that Ray takes
STARTS = 3  # because a Ray must be up in 30 seconds, and no setting changes that


@contextmanager
def small_ray(workers: int, folder: str) -> Iterator[None]:
    """Inside, this process is the driver of a Ray that has a CPU for each worker, and writes into `folder`.

    Args:
        folder: with a short name, because sockets have theirs from it.
    """
    token = secrets.token_hex(32)  # or Ray makes one in the user's home
    os.environ |= SETTINGS | {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": token, "PYTHONPATH": os.pathsep.join(sys.path)}
    import ray  # which reads the settings

    asked = {"include_dashboard": False, "object_store_memory": OBJECT_STORE, "log_to_driver": False}
    try:
        for start in range(STARTS):
            try:
                ray.init(num_cpus=workers, **asked)
                break
            except Exception as error:  # Ray has no narrower one for this
                ray.shutdown()
                if start == STARTS - 1 or "timed out during startup" not in str(error):
                    raise
        yield
    finally:
        ray.shutdown()


def processes_of(folder: str) -> list[int]:
    """Those of a Ray that writes into `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if os.fsencode(f"RAY_TMPDIR={folder}") in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found
