"""From a configuration to running workers: the local ranks that dlion starts itself, the ranks it finds itself in, or
workers simulated in this process.

A user's mistake is found here, before a worker starts and before a file is written. Signals become one step at
which all ranks stop (local_ranks.py, found_ranks.py).
"""

import sys
from functools import partial
from typing import Any

import torch

from dlion.channel import Channel
from dlion.train import loop
from dlion.train.config import DEFAULT_WORKERS, TrainConfig, from_flags, to_flags
from dlion.train.failure import Failure
from dlion.train.found_ranks import is_found, outcomes, run_as_found_rank
from dlion.train.jobs import Job, Place, check, open_run
from dlion.train.local_ranks import local_ranks
from dlion.train.ranks import Ranks, choose_device
from dlion.train.restarts import open_or_go_on
from dlion.train.simulated import Simulated


def run(config: TrainConfig, place: Place) -> int:
    """Train, and return the exit status of the command.

    0: finished; 1: a worker failed; 130, 143, 129: Ctrl-C, SIGTERM or a hang-up ended it after a checkpoint.

    Raises:
        ValueError: a mistake of the user, in one sentence; nothing was written.
    """
    if config.simulate is not None:
        if config.workers is not None:
            raise ValueError(
                f"--workers {config.workers} and --simulate {config.simulate} contradict each other: give one of them."
            )
        return _with_simulated(config, config.simulate, place)
    if is_found():
        return run_as_found_rank(config.workers, config.device, partial(_train_among_found, config, place))
    return _with_own_ranks(config, place)


def _with_own_ranks(config: TrainConfig, place: Place) -> int:
    torch.set_num_threads(1)  # checks compute already, and a pool of threads would not survive the fork
    workers = config.workers or DEFAULT_WORKERS
    device = choose_device(config.device, workers)
    settled = check(config, workers)
    with local_ranks(workers, device) as ranks:
        job = open_run(settled, place)
        if job is None:
            return 0
        try:
            failure = ranks.run(partial(loop.train, job))
        finally:
            job.folder.release()
    return _status(failure, job, ranks.status)


def _with_simulated(config: TrainConfig, workers: int, place: Place) -> int:
    if is_found():
        raise ValueError("--simulate runs all workers in one process: start it without torchrun or another launcher.")
    torch.set_num_threads(1)
    device = choose_device(config.device, local_workers=1)
    settled = check(config, workers)
    job = open_run(settled, place)
    if job is None:
        return 0
    here = Simulated(workers, torch.device(device))
    try:
        failure = here.run(partial(loop.train, job))
    finally:
        job.folder.release()
    return _status(failure, job, here.status)


def _status(failure: Failure | None, job: Job, otherwise: int) -> int:
    if failure is None:
        return otherwise
    print(f"dlion: {_blame(failure, job)}", file=sys.stderr)
    return 1


def _train_among_found(config: TrainConfig, place: Place, ranks: Ranks) -> None:
    job = _agree_on_run(config, place, ranks.channel)
    if job is not None:
        loop.train(job, ranks)


def _agree_on_run(config: TrainConfig, place: Place, channel: Channel) -> Job | None:
    """Every rank checks what it was asked for, rank 0 opens the run folder; a mistake of one is told by all."""
    settled = from_flags(outcomes(channel, lambda: to_flags(check(config, channel.size)))[0])

    def open_on_rank_0() -> dict[str, Any] | None:
        job = open_or_go_on(settled, place) if channel.rank == 0 else None
        return job.to_json() if job else None

    told = outcomes(channel, open_on_rank_0)[0]
    job = Job.from_json(told) if told else None
    outcomes(channel, lambda: job.folder.check_seen_by(channel.rank) if job else None)
    return job


def _blame(failure: Failure, job: Job) -> str:
    """One sentence about who failed; all that was said of it goes to the run's failure.log."""
    more = failure.keep(job.folder.failure_log)
    saved = (
        f"; go on with: dlion train --resume {job.folder.path}" if any(job.folder.checkpoints.glob("step-*")) else ""
    )
    return f"{failure.who} failed: {failure.cause} ({more}){saved}"
