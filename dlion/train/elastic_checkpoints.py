"""Checkpoints of an elastic run, written by whoever lives: `dlion.checkpoint` in the folder of the run."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

import dlion.checkpoint
from dlion.crew import Crew
from dlion.errors import CheckpointError, ExchangeError
from dlion.train.checkpoints import Progress
from dlion.train.runs import RunFolder, finite

ALONE = Crew(1, (0,), None)

if TYPE_CHECKING:
    from dlion.train.elastic_loop import ElasticRun


def save(run: "ElasticRun") -> None:
    """Write a checkpoint with all who took part in the commit of this step, and keep the last ones.

    A worker that was lost in the commit or here costs this checkpoint, not the run; that of the last step is then
    written by the worker that leads, alone.
    """
    optimizer = run.trainee.optimizer
    final = _path(run)
    last = run.progress.step == run.config.steps
    try:
        if optimizer.notes:  # without them the others may not come here
            final.parent.mkdir(exist_ok=True)
            _write(run, optimizer.company.group or ALONE)
    except (CheckpointError, ExchangeError) as error:
        optimizer.company.part()
        run.say(f"the checkpoint of step {run.progress.step} was not written: {str(error).splitlines()[0]}")
    if run.leads:
        if last and not dlion.checkpoint.is_complete(final):
            _write(run, ALONE)
        for old in _all(run.folder)[: -run.config.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)


def restore(run: "ElasticRun") -> None:
    """Take up the newest complete checkpoint, where there is one: this worker's own part if all had a part in it."""
    found = dlion.checkpoint.latest(run.folder.checkpoints)
    if found is None:
        return
    mine = Crew(run.trainee.size, (run.number,), None)  # nobody else need be there
    extra = dlion.checkpoint.load(found, run.trainee.model, run.trainee.optimizer, process_group=mine)
    run.progress = Progress(**extra["progress"])


def _write(run: "ElasticRun", workers: dist.ProcessGroup | Crew) -> None:
    said = {"progress": {key: finite(value) for key, value in asdict(run.progress).items()}}
    model, optimizer = run.trainee.model, run.trainee.optimizer
    dlion.checkpoint.save(_path(run), model, optimizer, extra=said, notes=said, process_group=workers)


def _path(run: "ElasticRun") -> Path:
    return run.folder.checkpoints / f"step-{run.progress.step:08d}"


def _all(folder: RunFolder) -> list[Path]:
    return sorted(path for path in folder.checkpoints.glob("step-*") if dlion.checkpoint.is_complete(path))
