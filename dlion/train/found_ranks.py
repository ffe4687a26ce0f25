"""This process as one of the ranks that torchrun or another launcher started."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist

from dlion.channel import Channel
from dlion.train.ranks import BLAME_SECONDS, Ranks, choose_device, handle_signals, join, one_line, only_lost_contact


def is_found() -> bool:
    """Whether a launcher says that this process is a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_as_found_rank(
    workers: int | None, device: Literal["auto", "cpu", "cuda"], work: Callable[[Ranks], None]
) -> int:
    """Join the others and do `work`; the exit status of the command.

    Args:
        workers: what the user asked for; None leaves it to the launcher.
        device: as in `choose_device`.
        work: what a rank does.

    Raises:
        ValueError: the launcher counts wrongly or the user contradicts it; or what `work` raised.
    """
    size = _size_of_group()
    if workers not in (None, size):
        raise ValueError(f"--workers {workers} contradicts the launcher, which started {size}: leave --workers out.")
    chosen = choose_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    try:
        number = _work_among_found(chosen, work)
        dist.destroy_process_group()
    except (RuntimeError, OSError) as error:
        if only_lost_contact(error):
            time.sleep(BLAME_SECONDS)
        print(f"dlion: rank {os.environ['RANK']} failed: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return 1
    # A thread of a process group that lives on while the interpreter is taken down aborts the process now and
    # then (seen with gloo), and the launcher would call a finished run a failure. Forked ranks end like this too.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + number if number else 0)


def _size_of_group() -> int:
    size, rank = (os.environ[name].strip() for name in ("WORLD_SIZE", "RANK"))
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise ValueError(
            f"the launcher set RANK={rank} and WORLD_SIZE={size}, and a rank must be one of 0 to WORLD_SIZE - 1: "
            "unset both to let dlion start its own workers."
        )
    return int(size)


def _work_among_found(device: Literal["cpu", "cuda"], work: Callable[[Ranks], None]) -> int:
    """Returns the number of the signal that stopped the work, 0 for none."""
    received: list[int] = []
    ranks = join(device, lambda: received[0] if received else 0)
    handle_signals(lambda number, frame: received.append(number))  # not before: a rank that waits can be ended
    work(ranks)
    return ranks.stop.signal


def outcomes(channel: Channel, act: Callable[[], Any]) -> list[Any]:
    """What `act` returned on each rank (JSON).

    Raises:
        ValueError: on every rank, the mistake of the first rank that made one.
    """
    try:
        answer = {"value": act()}
    except (ValueError, OSError) as error:
        answer = {"mistake": one_line(error)}
    answers = channel.gather_json(answer)
    mistakes = [answer["mistake"] for answer in answers if "mistake" in answer]
    if mistakes:
        raise ValueError(mistakes[0])
    return [answer["value"] for answer in answers]
