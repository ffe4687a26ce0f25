"""Faults inside a worker: functions of dlion and Python are wrapped from outside, counted, and fail where planned.

The product knows nothing of it. Before a fault hits, a line that says so is on the disk; after every step another
line says what the parameters are.
"""

import functools
import json
import os
import signal
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_plan import Fault
from torch import Tensor

import dlion
from dlion import checkpoint
from dlion.channel import Channel
from dlion.checkpoint.saving import Saving
from dlion.exchange import Exchange
from dlion.pipeline import FusedLion, Pipeline
from dlion.train.image_task import ImageTask

_fsync = os.fsync

BUCKET_BYTES = 2048  # of 13 kB of ballots: a bucket that is half applied is a thing that can be met


class Events:
    """A worker's log: one JSON object a line, each written by one call, so that a kill never leaves half of one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, *, durable: bool = False, **facts: Any) -> None:
        line = {"event": event, "pid": os.getpid(), "at": time.monotonic(), "cpu": time.process_time(), **facts}
        os.write(self._file, (json.dumps(line) + "\n").encode())
        if durable:
            _fsync(self._file)


def events(path: Path) -> list[dict[str, Any]]:
    """What a worker wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Injector:
    """Knows where this worker is, and lets the faults of that place happen, each once.

    Args:
        faults: of this worker.
        log: where it is written.
        disk: a folder of the file system that may become full.
    """

    def __init__(self, faults: Sequence[Fault], log: Events, disk: Path) -> None:
        self._pending = list(faults)
        self._log = log
        self._disk = disk
        self.step = 0  # under way, or done last
        self.done = 0
        self.voted = False  # whether ballots of this step have left
        self.saving: Saving | None = None  # the last checkpoint
        self._operations: Counter[Fault] = Counter()  # on files since the fault's step was done

    def begin(self, step: int) -> None:
        """A step begins: neither its gradients nor ballots are there."""
        self.step, self.voted = step, False
        if self.saving is not None and any(f.step == step and f.phase != "saving" for f in self._pending):
            self.saving.ended()  # a run that resumes after this fault shall have the checkpoint before it
        self.reach("ballots")

    def end(self, step: int) -> None:
        """A step is done; a checkpoint of it may be written from now on, beside the steps that follow."""
        self.done = step

    def operate(self) -> None:
        """A file operation begins, in whatever thread."""
        for fault in [f for f in self._pending if f.phase == "saving" and f.step <= self.done]:
            self._operations[fault] += 1
            if self._operations[fault] == fault.operation:
                self._pending.remove(fault)
                self._hit(fault)

    def reach(self, phase: str) -> None:
        """Let happen what was planned for this phase of this step."""
        for fault in [f for f in self._pending if (f.step, f.phase) == (self.step, phase)]:
            self._pending.remove(fault)
            self._hit(fault)

    def spoil(self, inputs: Tensor, step: int) -> Tensor:
        """The inputs of a batch, or NaN where that was planned."""
        for fault in [f for f in self._pending if (f.step, f.phase) == (step, "batch")]:
            self._pending.remove(fault)
            self._log.write("fault", durable=True, name=fault.name, step=fault.step)
            inputs = torch.full_like(inputs, torch.nan)
        return inputs

    def _hit(self, fault: Fault) -> None:
        self._log.write("fault", durable=True, name=fault.name, step=fault.step)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind in ("stop", "pause"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "full":
            self._log.write("filled", durable=True, name=fault.name, errno=_fill(self._disk / "filler"))


def _fill(file: Path) -> int:
    """Write until the disk takes no more; the number of the error that says so."""
    handle, found = os.open(file, os.O_WRONLY | os.O_CREAT), 0
    try:
        for size in (2**16, 1):  # and the last bytes one by one
            try:
                while True:
                    os.write(handle, bytes(size))
            except OSError as error:
                found = error.errno or 0
    finally:
        os.close(handle)
    return found


def install(injector: Injector, log: Events, timeout: float) -> None:
    """Wrap what a worker calls; `timeout`: seconds, of its process group."""
    init, step = dist.init_process_group, dlion.Distributed.step

    def init_process_group(*args: Any, **options: Any) -> Any:
        return init(*args, **{"timeout": timedelta(seconds=timeout), **options})

    @functools.wraps(step)
    def told(self: Any, *args: Any, **options: Any) -> Any:
        result = step(self, *args, **options)
        log.write("step", step=injector.step, **parameters_of(self))
        injector.end(injector.step)
        return result

    dist.init_process_group = init_process_group
    dlion.Distributed.step = told  # type: ignore[method-assign]
    follow(injector, log)


def follow(injector: Injector, log: Events) -> None:
    """Wrap what workers of every kind call; the model becomes one of several buckets."""
    _follow_batches(injector, log)
    _follow_calls(injector, log)
    _follow_files(injector)
    made, bind = dlion.Distributed.__init__, Exchange.bind

    @functools.wraps(made)
    def sharded(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **{"topology": "sharded", "bucket_bytes": BUCKET_BYTES, **options})

    @functools.wraps(bind)
    def counted(self: Any, *args: Any, **options: Any) -> None:
        bind(self, *args, **options)
        log.write("layout", buckets=len(self.layout.buckets))

    dlion.Distributed.__init__ = sharded  # type: ignore[method-assign]
    Exchange.bind = counted  # type: ignore[method-assign]


def _follow_batches(injector: Injector, log: Events) -> None:
    batch = ImageTask.batch

    @functools.wraps(batch)
    def spoiled(self: Any, *, step: int, **options: Any) -> tuple[Tensor, Tensor]:
        log.write("batch", step=step)
        injector.begin(step)
        inputs, targets = batch(self, step=step, **options)
        return injector.spoil(inputs, step), targets

    ImageTask.batch = spoiled  # type: ignore[method-assign]


def parameters_of(optimizer: "dlion.Distributed") -> dict[str, Any]:
    """What must be equal on all workers after a step, and what must be finite."""
    params = [param.detach() for group in optimizer.param_groups for param in group["params"]]
    momenta = [state["exp_avg"] for state in optimizer.state.values()]
    digest = 0
    for param in params:
        digest = zlib.crc32(param.numpy().tobytes(), digest)
    finite = all(bool(tensor.isfinite().all()) for tensor in [*params, *momenta])
    return {"t": optimizer.param_groups[0]["t"], "parameters": digest, "finite": finite}


def _follow_calls(injector: Injector, log: Events) -> None:
    all_to_all, all_gather = Channel.all_to_all, Channel.all_gather

    def ballots(self: Any, rows: Tensor) -> Any:
        log.write("ballots", step=injector.step)
        call = all_to_all(self, rows)
        injector.voted = True
        return call

    def verdicts(self: Any, row: Tensor) -> Any:
        if injector.voted:
            injector.reach("between")
        return all_gather(self, row)

    Channel.all_to_all = ballots  # type: ignore[method-assign]
    Channel.all_gather = verdicts  # type: ignore[method-assign]
    for implementation in (FusedLion, Pipeline):
        _follow_apply(implementation, injector)


def _follow_apply(implementation: Any, injector: Injector) -> None:
    apply = implementation.apply

    def watched(self: Any, *args: Any) -> None:
        injector.reach("verdict")
        apply(self, *args)
        injector.reach("apply")  # the first of several buckets: the parameters are half new

    implementation.apply = watched


def _follow_files(injector: Injector) -> None:
    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def operate(*args: Any, **options: Any) -> Any:
            injector.operate()
            return operation(*args, **options)

        return operate

    save = checkpoint.save

    @functools.wraps(save)
    def remembered(*args: Any, **options: Any) -> Saving:
        injector.saving = save(*args, **options)
        return injector.saving

    os.fsync = counted(os.fsync)
    os.replace = counted(os.replace)
    checkpoint.save = remembered
