"""One run and its faults: start the workers, watch what happens, resume, and say what held and what did not."""

import functools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from delay_switch import enter
from fault_injection import Events, Injector, events, install
from fault_plan import LINK, SAVE_EVERY, WORKERS, Cell, Fault
from fault_processes import Team, Worker, environment, meeting_point, team
from links import Place, shaped

from dlion.cli import main as dlion
from dlion.train import launch, loop
from dlion.train.config import TrainConfig
from dlion.train.jobs import check

Record = dict[str, Any]

TIMEOUT = 5.0  # seconds, of the workers' process group
BOUND = 10.0  # seconds in which every survivor of a lost worker has ended
STOP_BOUND = TIMEOUT + 5.0  # and of one that is stopped
LIMIT = 90.0  # seconds of one command, whatever happens
DISK = "24m"  # the file system that becomes full: three checkpoints of 3 MB, and room

FLAGS = """train --device cpu --model conv --batch-size 8 --log-every 1 --eval-every 1000""".split()


class NotFiredError(Exception):
    """A fault that was planned did not happen: the harness is wrong, whatever dlion did."""


@dataclass
class Attempt:
    """What one command of all workers did.

    Attributes:
        workers: as they ended. events: each worker's lines. stopped: the last time a worker was seen to stop.
        hung: who had to be killed after LIMIT.
        shaped: how often the kernel held a packet back on the slow links; 0 where there were none.
    """

    folder: Path
    workers: list[Worker]
    events: list[list[Record]]
    stopped: dict[int, float] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)
    shaped: int = 0

    @property
    def statuses(self) -> list[int | None]:
        return [worker.ended for worker in self.workers]

    def steps(self) -> list[dict[int, Record]]:
        """Of each worker: number of a step -> what was true after it."""
        return [{e["step"]: e for e in mine if e["event"] == "step"} for mine in self.events]

    def fired(self, name: str, event: str = "fault") -> Record | None:
        """The line that a worker wrote about this fault."""
        return next((e for mine in self.events for e in mine if e["event"] == event and e.get("name") == name), None)


def flags_of(cell: Cell) -> list[str]:
    return [*FLAGS, "--save-every", str(SAVE_EVERY), "--steps", str(cell.steps), *cell.flags]


def attempt(folder: Path, command: Sequence[str], faults: Sequence[Fault], disk: Path) -> Attempt:
    """Run the command with the faults on all workers, and see all of them to their end."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        slow = any(fault.kind == "slow" for fault in faults)
        places: list[Place] = stack.enter_context(shaped(WORKERS, LINK)) if slow else []
        address = stack.enter_context(meeting_point(places[0] if places else None, folder))
        here = stack.enter_context(team())
        for rank in range(WORKERS):
            mine = [fault for fault in faults if fault.rank == rank and fault.kind != "slow"]
            work = functools.partial(_work, rank, command, mine, folder, disk, places)
            variables = {**environment(rank, WORKERS, places), **address}
            here.start(rank, work, folder / f"output-{rank}.txt", variables)
        made = Attempt(folder, here.workers, [])
        _watch(here, made, time.monotonic() + LIMIT)
        made.hung = [worker.rank for worker in here.workers if worker.ended is None]
        made.shaped = _held_back(places)
    made.events = [events(folder / f"events-{rank}.jsonl") for rank in range(WORKERS)]
    return made


def load() -> None:
    """Import and read what workers need, once: they are forks of this process, which must compute nothing itself."""
    torch.set_num_threads(1)
    assert launch.loop is loop  # imported, with all that it needs
    check(TrainConfig(), WORKERS)  # reads data, makes an optimizer: the first one imports a compiler


def _work(
    rank: int, command: Sequence[str], faults: Sequence[Fault], folder: Path, disk: Path, places: Sequence[Place]
) -> int:
    if places:
        enter(places[rank].namespace)
    log = Events(folder / f"events-{rank}.jsonl")
    loop.write_report = lambda *finished: None  # pages and drawings: half of the time of so short a run
    install(Injector(faults, log, disk), log, TIMEOUT)
    return dlion(command)


def _watch(here: Team, made: Attempt, deadline: float) -> None:
    """Until all have ended. A paused worker goes on when another waits for it, a stopped one when nobody is left."""
    while any(worker.ended is None for worker in here.workers) and time.monotonic() < deadline:
        for worker in here.changes(min(deadline, time.monotonic() + 0.1)):
            if worker.stopped:
                made.stopped[worker.rank] = worker.stopped_at
        for worker in [each for each in here.workers if each.stopped]:
            others = [each for each in here.workers if each is not worker]
            if all(each.ended is not None for each in others) or _is_awaited(made.folder, worker, others):
                os.kill(worker.pid, signal.SIGCONT)


def _is_awaited(folder: Path, paused: Worker, others: Sequence[Worker]) -> bool:
    """Whether it stopped for a pause, and another worker has sent ballots of that step, or has had a second for it."""
    last = [event for event in events(folder / f"events-{paused.rank}.jsonl") if event["event"] == "fault"][-1]
    if not last["name"].startswith("pause"):
        return False
    return time.monotonic() > paused.stopped_at + 1 or any(
        event["event"] == "ballots" and event["step"] >= last["step"]
        for other in others
        for event in events(folder / f"events-{other.rank}.jsonl")
    )


def _held_back(places: Sequence[Place]) -> int:
    """How often a slow link was busy when a packet came, of all workers."""
    said = [
        subprocess.run(
            ["tc", "-s", "-n", place.namespace, "qdisc", "show", "dev", place.interface],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for place in places
    ]
    return sum(int(number) for text in said for number in re.findall(r"overlimits (\d+)", text))


@contextmanager
def disk_for(faults: Sequence[Fault], folder: Path) -> Iterator[Path]:
    """A folder for runs; where a fault fills the disk it is a file system of its own, made for this."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    if not any(fault.kind == "full" for fault in faults):
        yield disk
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)], check=True, capture_output=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, capture_output=True)


def missing_for_disk() -> str | None:
    """What stands in the way of a disk that becomes full, in one sentence; None if nothing does."""
    if os.geteuid() != 0:
        return "a small file system needs root, to be mounted: run the command as root."
    probe = Path("/tmp") / f"dlion-faults-{os.getpid()}"
    try:
        with disk_for([Fault("full", 0, 1, "saving")], probe):
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        return f"a small file system cannot be mounted here: {error}"
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def proofs(made: Attempt, faults: Sequence[Fault]) -> list[str]:
    """How it is known of each fault that it happened.

    Raises: NotFiredError names the first that did not.
    """
    return [_proof(made, fault) for fault in faults]


def _proof(made: Attempt, fault: Fault) -> str:
    line = made.fired(fault.name)
    if fault.kind == "slow":
        if not made.shaped:
            raise NotFiredError(f"{fault.name}: no packet was held back on the slow links.")
        return f"tbf held back {made.shaped} packets"
    if line is None:
        raise NotFiredError(f"{fault.name}: worker {fault.rank} never came to it; see {made.folder}.")
    worker = made.workers[fault.rank]
    if fault.kind == "kill" and worker.ended != -signal.SIGKILL:
        raise NotFiredError(f"{fault.name}: the worker ended with {worker.ended}, not by SIGKILL.")
    if fault.kind in ("stop", "pause") and not worker.stops:
        raise NotFiredError(f"{fault.name}: waitpid never saw the worker stopped.")
    if fault.kind == "full":
        filled = made.fired(fault.name, "filled")
        if filled is None or filled["errno"] != 28:
            raise NotFiredError(f"{fault.name}: the disk was not full ({filled}).")
        return "write said ENOSPC"
    told = {"kill": "waitpid: signal 9", "stop": "waitpid: stopped", "pause": "waitpid: stopped", "nan": "its line"}
    return told[fault.kind]
