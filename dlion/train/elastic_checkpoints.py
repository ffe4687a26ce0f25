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

    A worker that is lost here costs this checkpoint, not the run: it is made up for after the next step, and that of
    the last step is then written by the worker that leads, alone.
    """
    started = perf_counter()
    optimizer, progress = run.trainee.optimizer, run.progress
    final = path_of(run.folder, progress.step)
    try:
        if optimizer.notes:  # without them the others do not come here
            progress.checkpoints += 1
            final.parent.mkdir(exist_ok=True)
            _write(run, optimizer.rounds.group or ALONE)
    except (CheckpointError, ExchangeError) as error:
        optimizer.rounds.part()
        progress.checkpoints -= 1
        run.owes = isinstance(error, ExchangeError)  # a full disk is left alone until the next one is due
        run.say(f"the checkpoint of step {progress.step} was not written: {str(error).splitlines()[0]}")
    if run.leads:
        if progress.step == run.config.steps and not dlion.checkpoint.is_complete(final):
            progress.checkpoints += 1
            _write(run, ALONE)
        forget_outdated(run.folder, run.config.keep_checkpoints)
    progress.held_up += perf_counter() - started


def restore(run: "ElasticRun") -> int:
    """Take up the newest complete checkpoint: this worker's own part if as many had a part in it, else the mean.

    Returns:
        How many workers had a part in it; 0 where there is none.
    """
    found = dlion.checkpoint.latest(run.folder.checkpoints)
    if found is None:
        return 0
    optimizer = run.trainee.optimizer
    mine = Crew(run.trainee.size, (run.number,), None)  # nobody else need be there
    dlion.checkpoint.load(found, run.trainee.model, optimizer, process_group=mine)
    manifest = read_manifest(found)
    run.progress = Progress(**manifest.notes["progress"])
    for group in optimizer.param_groups:
        group["position"] = run.progress.step  # t is less where steps moved nothing
    return manifest.workers


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
