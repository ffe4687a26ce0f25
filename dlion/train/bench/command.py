"""`dlion bench` from its flags to its files: on local ranks, or on those that a launcher started."""

import os
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from dlion.train.bench.folder import BenchFolder
from dlion.train.bench.result import result_of
from dlion.train.bench.rounds import measure
from dlion.train.bench.settings import BenchConfig
from dlion.train.bench.table import show
from dlion.train.bench.turns import Stopped
from dlion.train.config import DEFAULT_WORKERS
from dlion.train.found_ranks import is_found, outcomes, run_as_found_rank
from dlion.train.local_ranks import local_ranks
from dlion.train.progress import display
from dlion.train.ranks import Ranks, choose_device


def run(config: BenchConfig, out: Path | None) -> int:
    """Measure, write the folder, and return the exit status of the command.

    0: finished; 1: a worker failed; 130, 143, 129: Ctrl-C, SIGTERM or a hang-up ended it, and nothing was written.

    Raises:
        ValueError: a mistake of the user, in one sentence; nothing was written.
    """
    if is_found():
        return run_as_found_rank(config.workers, config.device, partial(_bench_among_found, config, out))
    workers = config.workers or DEFAULT_WORKERS
    device = choose_device(config.device, workers)
    with local_ranks(workers, device) as ranks:
        folder = BenchFolder.claim(out, _stem(workers))
        try:
            failure = ranks.run(partial(bench, config, folder))
            more = failure.keep(folder.failure_log) if failure is not None else ""
        finally:
            folder.leave()
    if failure is not None:
        print(f"dlion: {failure.who} failed: {failure.cause} ({more})", file=sys.stderr)
        return 1
    return ranks.status


def bench(config: BenchConfig, folder: BenchFolder, ranks: Ranks) -> None:
    """What one rank does: measure with the others; rank 0 writes and tells."""
    torch.set_num_threads(ranks.threads)
    screen = display(0, ranks.channel.rank)
    with suppress(Stopped):
        measured = measure(config, ranks, screen)
        if ranks.channel.rank == 0:
            result = result_of(config, ranks, measured)
            folder.write(result)
            show(result)
            screen.say(f"written: {folder.figures} and {folder.page}")
        ranks.channel.barrier()


def _bench_among_found(config: BenchConfig, out: Path | None, ranks: Ranks) -> None:
    """Rank 0's flags count and rank 0 has the folder; a mistake of one is told by all."""
    channel = ranks.channel

    def claim_on_rank_0() -> dict[str, str] | None:
        if channel.size < 2:
            raise ValueError("the launcher started one worker, and a vote needs at least 2: start more of them.")
        if channel.rank > 0:
            return None
        path = BenchFolder.claim(out, _stem(channel.size)).path
        return {"path": str(path), "told": f"{path.resolve()} on {socket.gethostname()}"}

    settled = BenchConfig.from_json(outcomes(channel, config.to_json)[0])
    claimed = outcomes(channel, claim_on_rank_0)[0]
    folder = BenchFolder(Path(claimed["path"]))
    if channel.rank > 0 and os.environ.get("LOCAL_RANK") == "0":  # one voice on each of the other machines
        print(f"rank 0 shows the results and writes them to {claimed['told']}", flush=True)
    try:
        bench(settled, folder, ranks)
    finally:
        if channel.rank == 0:
            folder.leave()


def _stem(workers: int) -> str:
    return f"gpt-n{workers}"
