"""Faults inside an elastic worker: the process that `dlion train --elastic` starts, and starts again."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fault_injection import Events, Injector, events, follow, parameters_of
from fault_plan import Fault

from dlion.elastic import Elastic
from dlion.train import elastic_loop, elastic_worker

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer imports a compiler; forks of this have it


@dataclass(frozen=True)
class Planned:
    """What each worker's process is told beside its task: where it writes, and the faults of all workers."""

    folder: Path
    faults: tuple[Fault, ...]

    def work(self, task: Any) -> None:
        """What a worker's process runs, with its faults; those that have hit an earlier process of it are over."""
        file = self.folder / f"events-{task.number}.jsonl"
        over = {event["name"] for event in events(file) if event["event"] == "fault"}
        mine = [fault for fault in self.faults if fault.rank == task.number and fault.name not in over]
        log = Events(file)
        log.write("begun")
        install(mine, log, self.folder)
        elastic_worker.work(task)


def install(faults: Sequence[Fault], log: Events, disk: Path) -> None:
    """Wrap what an elastic worker calls."""
    injector = Injector(faults, log, disk)
    elastic_loop.write_report = lambda *finished: None  # type: ignore[assignment]
    follow(injector, log)
    step, commit = Elastic.step, Elastic._commit

    @functools.wraps(step)
    def told(self: Any, *args: Any, **options: Any) -> Any:
        log.write("entered", step=injector.step, position=self.position)
        result = step(self, *args, **options)
        facts = {"round": self.round, "voted": not self._stale, "here": self.workers_here}
        log.write("step", step=self.position, **facts, **parameters_of(self))
        injector.end(self.position)
        return result

    @functools.wraps(commit)
    def committed(self: Any) -> None:
        injector.reach("verdict")
        commit(self)

    Elastic.step = told  # type: ignore[method-assign]
    Elastic._commit = committed  # type: ignore[method-assign]
