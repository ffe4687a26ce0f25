"""Worlds of threads: each rank is a thread with real Gloo groups of its own. A world takes 0.1 s to make."""

import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dlion.voting import adopt


def gloo_group(store: Any, name: str, rank: int, size: int, seconds: float) -> dist.ProcessGroup:
    """A process group over Gloo that needs no default group."""
    prefixed = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(prefixed, rank, size)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", prefixed), rank, size, timedelta(seconds=seconds))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(name)
    return group


def world(size: int, work: Callable[[int, dist.ProcessGroup], Any], seconds: float = 30) -> list[Any]:
    """Run `work(rank, group)` on `size` ranks at once; what each returned, or the exception it raised.

    The group passed is the parent; dlion's ballots and verdicts run on more of them.
    """
    store = dist.HashStore()
    results: list[Any] = [None] * size
    # dlion holds its groups weakly: in a real process torch keeps them until it is told to destroy them
    kept: list[list[dist.ProcessGroup]] = [[] for _ in range(size)]

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # each thread counts for itself, and sums depend on it
        try:
            groups = kept[rank]
            groups.append(gloo_group(store, "parent", rank, size, seconds))

            def make(name: str) -> dist.ProcessGroup:
                groups.append(gloo_group(store, name, rank, size, seconds))
                return groups[-1]

            adopt(groups[0], make)
            results[rank] = work(rank, groups[0])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 30)
    for groups in kept:
        groups.clear()  # or the file descriptors of all worlds of a test run add up
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"ranks {stuck} hang"
    return results


def succeed(results: list[Any]) -> list[Any]:
    """The results, or a failure that shows every rank's exception."""
    failed = {rank: error for rank, error in enumerate(results) if isinstance(error, BaseException)}
    assert not failed, "\n".join(f"rank {rank}: {''.join(traceback.format_exception(e))}" for rank, e in failed.items())
    return results
