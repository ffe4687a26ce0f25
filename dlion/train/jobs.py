"""What the user asked for, checked against what there is: names, data, and the folder of the run."""

import time
from dataclasses import asdict, dataclass, field
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import torch

from dlion.methods import METHODS
from dlion.ops import reference
from dlion.simulate import Simulation
from dlion.train import checkpoints
from dlion.train.checkpoints import Checkpoint, Progress
from dlion.train.config import DEFAULT_LR, Settled, TrainConfig, from_flags, settle, to_flags, unknown_name
from dlion.train.models import build_model
from dlion.train.reading import AS_USUAL, Reading, reading_of
from dlion.train.runs import RunFolder, differences
from dlion.train.tasks import Task, load_task
from dlion.train.tracking import check_trackers
from dlion.train.weights import load_weights, weights_of
from dlion.train.workers import choices


@dataclass(frozen=True)
class Place:
    """Where a run lives: a new folder (`name` inside `out`), or an old one that is continued (`resume`)."""

    out: Path = Path("runs")
    name: str | None = None
    resume: Path | None = None


@dataclass(frozen=True)
class Job:
    """A run that can start: everything a worker must be told."""

    config: Settled
    folder: RunFolder
    checkpoint: Checkpoint | None = None
    started: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        """As JSON, for ranks that another launcher started."""
        point = self.checkpoint
        return {
            "config": to_flags(self.config),
            "folder": str(self.folder.path),
            "checkpoint": asdict(point) | {"path": str(point.path)} if point else None,
        }

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Job":
        """The inverse of `to_json`."""
        point = told["checkpoint"]
        return cls(
            from_flags(told["config"]),
            RunFolder(Path(told["folder"])),
            Checkpoint(Path(point["path"]), Progress(**point["progress"]), point["workers"], tuple(point["remarks"]))
            if point
            else None,
        )


@cache
def data_of(task: str, data: str | None, reading: Reading = AS_USUAL, pretrained: str | None = None) -> Task:
    """The task, loaded once per process; forked workers share what their launcher has loaded."""
    return load_task(task, data, reading, pretrained)


def task_of(config: TrainConfig) -> Task:
    """The task of a configuration, loaded once per process."""
    return data_of(config.task, config.data, reading_of(config), config.pretrained)


def check(config: TrainConfig, workers: int) -> Settled:
    """Check every name and the data, and fill in what the user left open.

    Raises:
        ValueError: unknown method, task or model; missing data; too many workers for the data.
    """
    if config.method not in METHODS:
        raise unknown_name("method", config.method, list(METHODS))
    check_trackers(config.track)
    task = task_of(config)
    with torch.device("meta"):  # whether it fits is seen without its memory
        build_model(config.model, task, config)
    sizes = batch_sizes_of(config, workers)
    task.batch(seed=config.seed, rank=workers - 1, workers=workers, step=0, size=1, iid=config.iid)
    defaults = METHODS[config.method].rule(reference, "nearest", None).defaults()
    settled = settle(
        config,
        model=config.model or task.default_model,
        workers=workers,
        steps_per_epoch=steps_per_epoch(config, sizes, task.info.train_size),
        lr=max(DEFAULT_LR, defaults["lr"]),
        betas=defaults.get("betas"),
    )
    parameter = torch.nn.Parameter(torch.zeros(1))  # what the method allows is found out before a worker starts
    Simulation(torch.nn.ParameterList([parameter]), workers=workers, **choices(settled))
    return settled


def batch_sizes_of(config: TrainConfig, workers: int) -> tuple[int, ...]:
    """Of each worker; unequal ones take as long for an epoch as their mean would."""
    sizes = config.batch_sizes or (config.batch_size,) * workers
    if len(sizes) != workers:
        raise ValueError(
            f"--batch-sizes gives {len(sizes)} sizes for {workers} workers: give one for each, or --batch-size for all."
        )
    return sizes


def steps_per_epoch(config: TrainConfig, batch_sizes: tuple[int, ...], train_size: int) -> int:
    """Steps in which the workers see `train_size` samples each, on average; with shared epochs all together.

    Args:
        batch_sizes: of each worker.

    Raises:
        ValueError: epochs are asked for and the size is not known, as of a stream.
    """
    if config.epochs is not None and train_size == 0:
        raise ValueError(f"--epochs {config.epochs} needs data whose size is known: give --steps for a stream.")
    times = 1 if config.shared_epochs else len(batch_sizes)
    return ceil(train_size * times / (sum(batch_sizes) * config.accumulate))


def open_run(config: Settled, place: Place) -> Job | None:
    """Make the folder of a new run, or find the point from which to continue an old one.

    Returns:
        None when the run to continue is finished already, which is said on the terminal.

    Raises:
        ValueError: the folder holds a different run, a damaged checkpoint or no run, or another command trains in it.
    """
    if place.resume is None:
        if config.init_from is not None:  # damage is found before there is a folder
            start = weights_of(Path(config.init_from))
            load_weights(build_model(config.model, task_of(config), config), start)
        return Job(config, RunFolder.create(place.out, place.name, config))
    folder = RunFolder.existing(place.resume)
    check_same_run(folder, config)
    folder.hold()
    try:
        checkpoint = point_of(folder, config)
    except BaseException:
        folder.release()
        raise
    if checkpoint is None:
        folder.release()
        return None
    return Job(config, folder, checkpoint)


def check_same_run(folder: RunFolder, config: Settled) -> None:
    """Raise a ValueError where a run to go on differs in more than it may."""
    stored = folder.read_config()
    free = {"steps", "save-every", "keep-checkpoints", "track", "workers", "simulate"}
    if config.workers != stored.workers:
        free |= {"batch-size", "batch-sizes"}
    other = [text for text in differences(config, stored) if text.split()[0].removeprefix("--") not in free]
    if other:
        raise ValueError(
            f"{folder.path} holds a different run ({other[0]}): only --steps, --save-every, --keep-checkpoints, --track"
            " and the number of workers (with it, batch sizes) can change when a run is resumed."
        )


def point_of(folder: RunFolder, config: Settled) -> Checkpoint | None:
    """Where to go on; None when the run is finished already, which is said on the terminal.

    Raises:
        ValueError: there is no checkpoint that is whole, or it is of another run, of other data or of a later step.
    """
    folder.records()  # damaged ones are found before any worker starts
    checkpoint = checkpoints.latest(folder, config, task_of(config).info)
    reached = checkpoint.progress.step
    if config.steps < reached:
        raise ValueError(
            f"{folder.path} is at step {reached} already: --steps must be more than that, not {config.steps}."
        )
    if config.steps == reached and folder.summary_file.exists():
        print(f"{folder.path} is finished after {reached} steps: nothing to do (a larger --steps lengthens it).")
        return None
    return checkpoint
