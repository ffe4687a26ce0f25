"""Ranks as real processes, started from a server that has imported torch once. They meet through a file: no ports."""

import faulthandler
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlion.train.orphans import end_with_launcher

PRELOADED = [
    "dlion.optim",
    "dlion.integrations.ddp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
]


def launch(
    folder: Path,
    size: int,
    work: Callable[..., Any],
    seconds: float = 60,
    stopped: Collection[int] = (),
    preload: Sequence[str] = (),
) -> list[Any]:
    """Run `work(rank, size, folder)` in `size` processes; the JSON value each returned, or its exit status.

    A process that raises shows its traceback and has status 1; where one is still there after `seconds`, that fails and
    says what it was doing. Those in `stopped` stop themselves, and are killed when the others have ended. Modules in
    `preload` are imported before there are processes, if no server has started yet.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *preload])
    processes = [context.Process(target=_run, args=(work, rank, size, folder), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    for rank, process in enumerate(processes):
        if rank not in stopped:
            process.join(max(0.0, deadline - time.monotonic()))
    for rank in stopped:
        processes[rank].kill()
        processes[rank].join()
    stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in stuck:
        os.kill(processes[rank].pid or 0, signal.SIGABRT)  # it writes down its stacks
        processes[rank].join(10)
        processes[rank].kill()
    assert not stuck, "\n".join(f"rank {rank} hangs:\n{_stacks(folder, rank).read_text()}" for rank in stuck)
    return [_result(folder, rank, process.exitcode) for rank, process in enumerate(processes)]


def meet(folder: Path, name: str, rank: int, size: int) -> None:
    """Make the default process group, at the file `name`."""
    dist.init_process_group("gloo", init_method=(folder / name).as_uri(), rank=rank, world_size=size)


def meet_at_rank_0(folder: Path, name: str, rank: int, size: int, seconds: float) -> None:
    """Make the default process group, whose store lives in rank 0's process; calls wait for `seconds`."""
    place = dist.FileStore(str(folder / name), size)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
        place.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(place.get("port")), size, False)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def _run(work: Callable[..., Any], rank: int, size: int, folder: Path) -> None:
    end_with_launcher()  # these tests, if they are killed
    faulthandler.enable(_stacks(folder, rank).open("w"))
    torch.set_num_threads(1)
    status = 1
    try:
        value = work(rank, size, folder)
        (folder / f"result-{rank}.json").write_text(json.dumps(value))
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)  # without waiting for threads of a group that may be broken


def _stacks(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}.txt"


def _result(folder: Path, rank: int, status: int | None) -> Any:
    file = folder / f"result-{rank}.json"
    return json.loads(file.read_text()) if file.exists() else status
