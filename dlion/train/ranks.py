"""A worker among the others: joining the process group, and stopping at one step that all agree on."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

import dlion
from dlion.channel import Channel
from dlion.errors import ExchangeError, ranks_text
from dlion.roll_call import Inquiry, StoreSilent
from dlion.train.config import Settled
from dlion.train.workers import OneOfMany, choices

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_SECONDS = 1.0  # after a first signal, in which a second one means the same: some tools send one Ctrl-C twice
MEET_SECONDS = 300.0  # for all workers to start
POLL_SECONDS = 0.01  # between two looks into the store while they do
BLAME_SECONDS = 1.0  # that a rank which only lost contact waits, so that the one that failed is seen first

STORE_SECONDS = 300.0  # for an answer of the store: torch's own limit, which it keeps only while the store lives


class StopSign:
    """Lets all ranks stop after the same step, although a signal reaches them at different times, or only one.

    Args:
        store: The key-value store of the process group.
        received: Number of the signal that this process was sent, 0 if none.
    """

    def __init__(self, store: Store, received: Callable[[], int]) -> None:
        self._inquiry = Inquiry(lambda: store)
        self._received = received
        self._last: int | None = None
        self.signal = 0

    def reached(self, step: int) -> bool:
        """Whether to stop now, after `step`. Every rank must ask after every step.

        A rank that was signalled announces, after its step s, that s + 1 is the last. No other rank can
        finish step s + 1 before this one has taken part in it, which is after the announcement, so each one
        finds the announcement when it asks after s + 1, and none has gone further.

        Raises:
            ExchangeError: the store does not answer.
        """
        if self._last is None and (found := self._ask(_announced)):
            self._last, self.signal = map(int, found.split())
        if self._last is None and self._received():
            self._last, self.signal = step + 1, self._received()
            announcement = f"{self._last} {self.signal}"
            self._ask(lambda store: store.set("dlion/stop", announcement))
        return self._last is not None and step >= self._last

    def _ask(self, question: Callable[[Store], T]) -> T:
        try:
            return self._inquiry.ask(question, STORE_SECONDS)
        except StoreSilent:
            raise ExchangeError(
                f"the process group's store has not answered for {STORE_SECONDS:g} s, and a stop would be announced "
                "there: look for an error on the worker that keeps it, most often rank 0"
            ) from None


def _announced(store: Store) -> str:
    return store.get("dlion/stop").decode() if store.check(["dlion/stop"]) else ""


@dataclass(frozen=True)
class Ranks:
    """What a worker knows about itself and the others."""

    channel: Channel
    device: torch.device
    threads: int
    stop: StopSign

    def workers(self, config: Settled, model: nn.Module) -> OneOfMany:
        """This process as one of the workers that train `model`, which becomes rank 0's everywhere."""
        model = dlion.local_gradients(model)
        optimizer = dlion.Distributed(model.named_parameters(), **choices(config), overlap=config.overlap)
        return OneOfMany(self.channel, self.device, config.threads or self.threads, self.stop, model, optimizer)


def join(device: Literal["cpu", "cuda"], received: Callable[[], int]) -> Ranks:
    """Join the process group that the environment describes."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    store, rank, size = next(rendezvous("env://"))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        store = fresh(store, rank, size)
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", local_rank)
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        store=store,
        rank=rank,
        world_size=size,
        device_id=None if device == "cpu" else place,
    )
    return Ranks(Channel(phase="the training loop"), place, threads_for(local_workers), StopSign(store, received))


def fresh(store: Store, rank: int, size: int, seconds: float = MEET_SECONDS) -> Store:
    """A part of the store that no worker has used before: all workers get the same.

    torchrun keeps the store when it starts workers again, and what the former ones wrote there would be believed: the
    network library would look for workers under their addresses. Rank 0 names a new part, and answers everybody who
    asks by that name with the word that came with the question: so a name that was left behind is found out.

    Raises:
        ExchangeError: names the ranks that did not come within `seconds`.
    """
    mine, ends, pause = uuid.uuid4().hex, time.monotonic() + seconds, threading.Event()
    missing = list(range(1, size)) if rank == 0 else [0]
    if rank == 0:
        store.set("dlion/part", mine)
    part = mine
    while missing and time.monotonic() < ends:
        if rank == 0:
            for other in [one for one in missing if store.check([f"dlion/ask/{part}/{one}"])]:
                store.set(f"dlion/answer/{part}/{other}", store.get(f"dlion/ask/{part}/{other}").decode())
                missing.remove(other)
        elif store.check(["dlion/part"]):
            part = store.get("dlion/part").decode()
            store.set(f"dlion/ask/{part}/{rank}", mine)
            answer = f"dlion/answer/{part}/{rank}"
            if store.check([answer]) and store.get(answer).decode() == mine:
                missing = []
        if missing:
            pause.wait(POLL_SECONDS)
    if missing:
        raise ExchangeError(
            f"rank {rank} waited {seconds:g} s to meet all {size} workers, and {ranks_text(missing)} did not come: "
            "look for an error there"
        )
    return PrefixStore(f"dlion/{part}", store)


def threads_for(local_workers: int) -> int:
    """Threads of each worker of this machine: OMP_NUM_THREADS, or its share of the cores."""
    asked = os.environ.get("OMP_NUM_THREADS") or ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(asked) if asked.isdecimal() and int(asked) else max(1, cores // local_workers)


def choose_device(asked: Literal["auto", "cpu", "cuda"], local_workers: int) -> Literal["cpu", "cuda"]:
    """The device for `local_workers` workers of this machine: CUDA where each can have its own GPU.

    Raises:
        ValueError: CUDA was asked for and there are fewer GPUs.
    """
    if asked == "cpu":
        return "cpu"
    gpus = torch.cuda.device_count()
    if asked == "auto":
        return "cuda" if gpus >= local_workers else "cpu"
    if gpus < local_workers:
        raise ValueError(
            f"--device cuda needs one GPU for each worker, and this machine has {gpus} for {local_workers} workers: "
            f"use {f'--workers {gpus} or ' if gpus else ''}--device cpu."
        )
    return "cuda"


def only_lost_contact(error: Exception) -> bool:
    """Whether a rank failed because another one did. gloo has no exception class of its own."""
    return isinstance(error, (ExchangeError, dist.DistError)) or (type(error) is RuntimeError and "gloo" in str(error))


def handle_signals(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Let `handler` answer the signals that stop the command; returns the handlers of before."""
    return {number: signal.signal(number, handler) for number in SIGNALS}


def one_line(error: object) -> str:
    """What an error says, without line breaks, at most 500 characters."""
    return " ".join(str(error).split())[:500]
