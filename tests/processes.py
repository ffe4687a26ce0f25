"""Ranks as real processes, started from a server that has imported torch once. They meet through a file: no ports."""

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def launch(folder: Path, size: int, work: Callable[..., Any], seconds: float = 60) -> list[Any]:
    """Run `work(rank, size, folder)` in `size` processes; the JSON value each returned, or its exit status.

    A process that raises shows its traceback and has status 1; one that is still there after `seconds` is killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dlion.optim", "dlion.integrations.ddp", "torch.distributed.checkpoint.state_dict"])
    processes = [context.Process(target=_run, args=(work, rank, size, folder), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in stuck:
        processes[rank].kill()
    assert not stuck, f"ranks {stuck} hang"
    return [_result(folder, rank, process.exitcode) for rank, process in enumerate(processes)]


def meet(folder: Path, name: str, rank: int, size: int) -> None:
    """Make the default process group, at the file `name`."""
    dist.init_process_group("gloo", init_method=(folder / name).as_uri(), rank=rank, world_size=size)


def _run(work: Callable[..., Any], rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    status = 1
    try:
        value = work(rank, size, folder)
        (folder / f"result-{rank}.json").write_text(json.dumps(value))
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)  # without waiting for threads of a group that may be broken


def _result(folder: Path, rank: int, status: int | None) -> Any:
    file = folder / f"result-{rank}.json"
    return json.loads(file.read_text()) if file.exists() else status
