"""Checkpoints of an elastic run, written by whoever lives: `dlion.checkpoint` in the folder of the run."""

from time import perf_counter
from typing import TYPE_CHECKING

import torch.distributed as dist

import dlion.checkpoint
from dlion.checkpoint.crew import ALONE, Crew
from dlion.checkpoint.manifest import read_manifest
from dlion.errors import CheckpointError, ExchangeError
from dlion.train.checkpoints import BEST, Progress, forget_outdated, notes_of, path_of
from dlion.train.jobs import task_of

if TYPE_CHECKING:
    from dlion.train.elastic_loop import ElasticRun


def save(run: "ElasticRun") -> None:
    """Write a checkpoint with all who took part in the commit of this step, and keep the last ones.

    A worker that was lost in the commit or here costs this checkpoint, not the run; that of the last step is then
    written by the worker that leads, alone.
    """
    started = perf_counter()
    optimizer = run.trainee.optimizer
    final = path_of(run.folder, run.progress.step)
    run.progress.checkpoints += 1
    last = run.progress.step == run.config.steps
    try:
        if optimizer.notes:  # without them the others may not come here
            final.parent.mkdir(exist_ok=True)
            _write(run, optimizer.rounds.group or ALONE)
    except (CheckpointError, ExchangeError) as error:
        optimizer.rounds.part()
        run.progress.checkpoints -= 1
        run.say(f"the checkpoint of step {run.progress.step} was not written: {str(error).splitlines()[0]}")
    if run.leads:
        if last and not dlion.checkpoint.is_complete(final):
            _write(run, ALONE)
        forget_outdated(run.folder, run.config.keep_checkpoints)
    run.progress.held_up += perf_counter() - started


def restore(run: "ElasticRun") -> None:
    """Take up the newest complete checkpoint, where there is one: this worker's own part if all had a part in it."""
    found = dlion.checkpoint.latest(run.folder.checkpoints)
    if found is None:
        return
    mine = Crew(run.trainee.size, (run.number,), None)  # nobody else need be there
    dlion.checkpoint.load(found, run.trainee.model, run.trainee.optimizer, process_group=mine)
    run.progress = Progress(**read_manifest(found).notes["progress"])


def _write(run: "ElasticRun", workers: dist.ProcessGroup | Crew) -> None:
    """With the notes of any run's checkpoint, so that a run can go on elastic or not."""
    best = run.folder.best_model
    dlion.checkpoint.save(
        path_of(run.folder, run.progress.step),
        run.trainee.model,
        run.trainee.optimizer,
        notes=notes_of(run.config, task_of(run.config).info, run.progress),
        files={BEST: best} if best.exists() else {},
        process_group=workers,
    )
