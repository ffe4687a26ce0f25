"""The training loop of one elastic worker: as `loop.train`, but nothing here waits for all others except `step()`.

What workers tell each other travels with the commit of a step, so a worker that is lost never leaves others waiting
at different places. The lowest worker of those that have been there leads: it writes the run folder and speaks on the
terminal. When it dies, the next one goes on from what it was told like everybody.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlion.elastic import Elastic
from dlion.train import checkpoints, elastic_checkpoints
from dlion.train.checkpoints import Progress
from dlion.train.config import Settled, learning_rate
from dlion.train.elastic_task import Task as Told
from dlion.train.jobs import task_of
from dlion.train.loop import due, exchange_of, gradients_of, resumed_text, summary_of, threads_text, validation
from dlion.train.progress import Display, display, results
from dlion.train.report import write_report
from dlion.train.runs import Record, RunFolder
from dlion.train.tasks import Task
from dlion.train.tracking import tracked
from dlion.train.weights import save_weights


@dataclass
class Trainee:
    """One worker among `size`."""

    size: int
    device: torch.device
    threads: int
    model: nn.Module
    optimizer: Elastic

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        self.model.zero_grad(set_to_none=True)
        yield


@dataclass
class ElasticRun:
    """One worker's part in a run.

    Attributes:
        told: about this worker. received: number of the signal that this process was sent, 0 if none.
        started: when this process began to train.
        owes: whether a checkpoint that was due has to be made up for.
    """

    config: Settled
    folder: RunFolder
    trainee: Trainee
    told: Told
    received: Callable[[], int]
    progress: Progress = field(default_factory=Progress)
    started: float = field(default_factory=time.time)
    _screen: Display | None = None
    _share: list[float] = field(default_factory=list)
    _last: int | None = None
    _leading: bool = False
    owes: bool = False
    signal: int = 0

    def train(self) -> int:
        """Train to the last step or to the one at which a signal stops all; the number of that signal, or 0."""
        config, optimizer, task = self.config, self.trainee.optimizer, task_of(self.config)
        spent = self._resume()
        optimizer.phases.start()
        while self.progress.step < config.steps:
            done = self.progress.step
            record = self._begun_record(task) if due(done, config.log_every) or due(done, config.eval_every) else None
            began = time.perf_counter()
            self.progress.step += 1
            self.progress.samples += config.samples_per_step
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, self.progress.step)
            loss = float(gradients_of(config, self.trainee, task, self.number, self.progress.step))
            optimizer.note = self._note(loss)
            optimizer.luggage = {"progress": asdict(self.progress), "stats": optimizer.stats.state_dict()}
            optimizer.step()
            Path(self.told.trained).touch()  # for the launcher
            if optimizer.position != done + 1:
                self._take_over()
                record = None
            self._hear(loss, record)
            self.progress.seconds += time.perf_counter() - began
            self.progress.seconds_total = spent + time.time() - self.started
            if self._has_to_save():
                elastic_checkpoints.save(self)
            if self._stops and self.progress.step < config.steps:
                if self.leads:
                    self.screen.close()
                self.say(f"stopped after step {self.progress.step}; go on with: {self.told.go_on}")
                return self.signal
        if self.leads or self._is_last_resort:
            with self.folder.alone():
                if self.leads or not self.folder.summary_file.exists():
                    self._finish(task)
        return 0

    @property
    def number(self) -> int:
        """Of this worker."""
        return self.told.number

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for all; before its first step worker 0 does, unless it was started again."""
        leader = self.trainee.optimizer.leader
        return self.number == leader if leader is not None else self.number == 0 and not self.told.again

    @property
    def _is_last_resort(self) -> bool:
        """Whether this worker came back when nothing was left to train: perhaps who led died over the results."""
        return self.told.again and self.trainee.optimizer.leader is None

    def say(self, *lines: str) -> None:
        """Tell the user, if this worker leads."""
        if self.leads:
            self.screen.say(*lines)

    @property
    def screen(self) -> Display:
        """What the terminal shows of the run; made when this worker begins to lead."""
        if self._screen is None:
            self._screen = tracked(display(self.config.steps, 0), self.folder, self.config, at=self.progress.step)
        return self._screen

    def _resume(self) -> float:
        """Go on from the run's last checkpoint, where there is one; the seconds spent before."""
        saved = elastic_checkpoints.restore(self)
        self.trainee.optimizer.luggage = None
        if self.leads:
            config, optimizer, threads = self.config, self.trainee.optimizer, self.trainee.threads
            who = f"{self.trainee.size} elastic workers on {self.trainee.device.type}, {threads_text(threads)}"
            setting = f"{config.method} ({optimizer.kernels} kernels), {who}"
            resumed = [resumed_text(self.progress.step, config.workers, saved)] if saved else []
            self.say(f"{config.task} with {config.model}, {setting}: {self.folder.path}", *resumed)
        return self.progress.seconds_total

    def _take_over(self) -> None:
        """Be where the others are, who have sent their state."""
        optimizer = self.trainee.optimizer
        self.progress = Progress(**optimizer.luggage["progress"])
        self.progress.step = optimizer.position
        optimizer.stats.load_state_dict(optimizer.luggage["stats"])

    def _begun_record(self, task: Task) -> Record:
        """The record of the steps done so far; and this worker's share of an evaluation where one is due."""
        done = self.progress.step
        if due(done, self.config.eval_every):
            here = self.trainee.optimizer.workers_here or list(range(self.trainee.size))
            place = here.index(self.number) if self.number in here else 0
            share = task.evaluate(
                self.trainee.model, rank=place, workers=len(here), device=self.trainee.device
            ).tolist()
            self._share = [done, place, len(here), *share]
            if self.leads:
                save_weights(self.trainee.model, self._candidate)
        return self._record()

    def _record(self) -> Record:
        config, done = self.config, self.progress.step
        record: Record = {"step": done}
        if done:
            record |= {"loss": self.progress.loss, "lr": learning_rate(config, done)}
        return record | {
            **exchange_of(self.trainee.optimizer),
            "seconds": self.progress.seconds,
            "samples_per_s": self.progress.samples / self.progress.seconds if self.progress.seconds else 0.0,
        }

    def _note(self, loss: float) -> dict[str, Any]:
        """What goes with the commit of the step that begins."""
        note: dict[str, Any] = {"loss": loss, "share": self._share}
        self._share = []
        if self._last is None and self.received():
            # those who miss this commit hear of it with the next one, and no one has gone further by then
            self._last, self.signal = self.progress.step + 1, self.received()
        stop = [self._last, self.signal] if self._last is not None else None
        return note | {"stop": stop, "owes": self.owes}

    def _hear(self, loss: float, record: Record | None) -> None:
        """What the others said with the commit; nothing, if this worker had to learn of it later."""
        notes = list(self.trainee.optimizer.notes.values())
        losses = [note["loss"] for note in notes] or [loss]
        self.progress.loss = math.fsum(losses) / len(losses)
        for note in notes:
            if note["stop"] is not None and self._last is None:
                self._last, self.signal = note["stop"]
        if record is not None:
            self._end_record(record, [note["share"] for note in notes if note["share"]])
        self.say(*self.trainee.optimizer.news)
        self.trainee.optimizer.news.clear()

    @property
    def _stops(self) -> bool:
        """Whether all stop after this step: with those who came into it unheard the stop waits for the next one."""
        return self._last is not None and self.progress.step >= self._last and bool(self.trainee.optimizer.notes)

    def _has_to_save(self) -> bool:
        """Whether a checkpoint is due after this step, with all who took part in its commit.

        A step that was decided by a round and brought to its end by the next one has no commit: its checkpoint is made
        up for after the next step, since a worker that has joined meanwhile does not come to it.
        """
        notes, step = self.trainee.optimizer.notes.values(), self.progress.step
        usual = due(step, self.config.save_every) or step == self.config.steps
        self.owes = not notes and (usual or self.owes)
        return usual or self._stops or any(note["owes"] for note in notes)

    def _end_record(self, record: Record, shares: list[list[float]]) -> None:
        done, config = record["step"], self.config
        if due(done, config.eval_every):
            whole = [share for share in shares if share[0] == done]
            if whole and len({share[1] for share in whole}) == whole[0][2] == len(whole):
                metrics = validation(task_of(config), [share[3:] for share in sorted(whole)])
                record |= metrics
                if checkpoints.is_best(self.progress, done, metrics) and self.leads:
                    os.replace(self._candidate, self.folder.best_model)
            else:
                self.say(f"the evaluation after step {done} is left out: a worker was lost in it")
        if self.leads:
            if not self._leading:
                self.folder.forget_from(done)  # what another leader may have written of it
                self._leading = True
            self.folder.append(record)
            self.screen.show(record)

    @property
    def _candidate(self) -> Path:
        """The model that is being evaluated: it is the best one, or not."""
        return self.folder.path / ".evaluated.safetensors"

    def _finish(self, task: Task) -> None:
        """Evaluate the last model and write the results: one worker does it alone, as nobody need wait for it."""
        config, done = self.config, self.progress.step
        record = self._record()
        whole = task.evaluate(self.trainee.model, rank=0, workers=1, device=self.trainee.device).tolist()
        metrics = validation(task, [whole])
        record |= metrics
        if checkpoints.is_best(self.progress, done, metrics):
            save_weights(self.trainee.model, self.folder.best_model)
        self.folder.forget_from(done)
        self.folder.append(record)
        self.screen.show(record)
        save_weights(self.trainee.model, self.folder.last_model)
        summary = summary_of(config, self.trainee, task, self.progress, record)
        self.folder.write_summary(summary | {"elastic": True})
        write_report(self.folder, config, summary)
        self._candidate.unlink(missing_ok=True)
        self.screen.close()
        self.screen.say(*results(self.folder, summary))
