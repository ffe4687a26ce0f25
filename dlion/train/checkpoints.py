"""Checkpoints of a run, by `dlion.checkpoint`: written while training goes on, and found again.

    checkpoints/step-00000500/
      .metadata, __0_0.distcp ...   parameters, and each worker's momenta, buffers and counters
      best.safetensors              the run's model.safetensors at that time
      manifest.json                 flags, data and progress of the run; length and SHA-256 of every file

The last ones are kept, and the one with the best validation metric.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from dlion import checkpoint
from dlion.checkpoint.manifest import Manifest
from dlion.checkpoint.saving import Saving
from dlion.errors import CheckpointError
from dlion.train.best import best_of, merit
from dlion.train.config import Settled, to_flags
from dlion.train.data import DataInfo
from dlion.train.legal import shown
from dlion.train.runs import Record, RunFolder, finite
from dlion.train.weights import share
from dlion.train.workers import Workers

BEST = "best.safetensors"
SIZE_OF_GROUP = ("workers", "simulate", "batch-size", "batch-sizes")  # a run may go on with others
MAY_CHANGE = ("steps", "data", "save-every", "keep-checkpoints", "track", *SIZE_OF_GROUP)  # and is the same run


@dataclass
class Progress:
    """How far a run has come: everything the loop knows besides tensors.

    Attributes:
        checkpoints: how many were written. held_up: seconds for which they held up training.
    """

    step: int = 0
    samples: int = 0
    loss: float | None = None
    seconds: float = 0.0
    seconds_total: float = 0.0
    best_step: int = 0
    best_loss: float | None = None
    best_accuracy: float | None = None
    checkpoints: int = 0
    held_up: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found to be whole.

    Attributes:
        workers: how many were saved. remarks: what is wrong with newer ones.
    """

    path: Path
    progress: Progress
    workers: int
    remarks: tuple[str, ...] = ()


def is_best(progress: Progress, step: int, record: Record) -> bool:
    """Whether the evaluation of `step` is the best so far (the first is), which `progress` then remembers."""
    before = {"val_loss": progress.best_loss, "val_accuracy": progress.best_accuracy}
    first = progress.best_loss is None and progress.best_accuracy is None
    better = first or merit(record) > merit(before)
    if better:
        progress.best_step = step
        progress.best_loss, progress.best_accuracy = finite(record["val_loss"]), record.get("val_accuracy")
    return better


class Keeper:
    """Writes the checkpoints of a run and deletes those that are not kept; all workers of all processes do the same.

    Args:
        data: that the run is trained on.
    """

    def __init__(self, folder: RunFolder, config: Settled, workers: Workers, data: DataInfo) -> None:
        self._folder, self._workers, self._config, self._data = folder, workers, config, data
        self._saving: Saving | None = None

    def save(self, progress: Progress) -> None:
        """Begin to write one, after the one before.

        Raises:
            CheckpointError: the one before could not be written.
        """
        started = perf_counter()
        self.finish()
        progress.checkpoints += 1
        self._saving = checkpoint.save(
            path_of(self._folder, progress.step),
            self._workers.model,
            self._workers.optimizer,
            notes=notes_of(self._config, self._data, progress),
            files={BEST: self._folder.best_model},
            asynchronous=True,
        )
        progress.held_up += perf_counter() - started

    def finish(self) -> None:
        """Return when the last one is complete, and only those are there that are kept.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        saving.wait()
        if 0 in self._workers.here:
            forget_outdated(self._folder, self._config.keep_checkpoints)


def notes_of(config: Settled, data: DataInfo, progress: Progress) -> Record:
    """What stands in the manifest of a run's checkpoint."""
    state = {key: finite(value) for key, value in asdict(progress).items()}
    return {"run": _what_run(config), "data": {"name": data.name, "sha256": data.sha256}, "progress": state}


def forget_outdated(folder: RunFolder, keep: int) -> None:
    """Delete the checkpoints that are not kept."""
    for step in _outdated(_steps(folder), folder.records(), keep):
        shutil.rmtree(path_of(folder, step), ignore_errors=True)


def _outdated(steps: list[int], records: list[Record], keep: int) -> list[int]:
    """The checkpoints that go: all but the last ones and the best of those that were evaluated."""
    judged = [record for record in records if record["step"] in steps and record.get("val_loss") is not None]
    best = best_of(judged)
    return [step for step in steps[:-keep] if best is None or step != best["step"]]


def latest(folder: RunFolder, config: Settled, data: DataInfo) -> Checkpoint:
    """The newest checkpoint that is whole, after comparing every file of it with its manifest.

    Raises:
        ValueError: there is none; or it is of another run, or of a run on other data.
    """
    steps = _steps(folder)
    if not steps:
        raise ValueError(f"{folder.path} has no checkpoint to resume from: start it again without --resume.")
    remarks: list[str] = []
    for step in reversed(steps):
        try:
            manifest = checkpoint.verify(path_of(folder, step))
            progress = _progress(manifest.notes.get("progress"), step)
        except CheckpointError as error:
            remarks.append(str(error).removesuffix(": take another one"))
            continue
        _check_run(folder, config, data, manifest)
        return Checkpoint(path_of(folder, step), progress, manifest.workers, tuple(remarks))
    raise ValueError(
        f"{folder.path} has no checkpoint that is whole ({remarks[0]}): start the run again without --resume."
    )


def _check_run(folder: RunFolder, config: Settled, data: DataInfo, manifest: Manifest) -> None:
    if manifest.notes.get("run") != _what_run(config):
        raise ValueError(
            f"the checkpoints in {folder.checkpoints} belong to a run with other flags than {folder.config_file} says: "
            "put that file right."
        )
    told: Any = manifest.notes.get("data")
    sha256 = told.get("sha256") if isinstance(told, dict) else None
    if sha256 != data.sha256:
        raise ValueError(
            f"{folder.path} was trained on other data ({shown(told)}) than there is now (SHA-256 {data.sha256}): "
            "give its own with --data."
        )


def restore(found: Checkpoint, workers: Workers) -> None:
    """Put the workers of this process back where they were when the checkpoint was written."""
    checkpoint.load(found.path, workers.model, workers.optimizer)


def rewind(folder: RunFolder, found: Checkpoint) -> None:
    """Undo what the run wrote after this checkpoint, so that going on writes it again."""
    folder.forget_from(found.progress.step)
    for outdated in (folder.summary_file, folder.report_file, folder.last_model):
        outdated.unlink(missing_ok=True)
    later = [path_of(folder, step) for step in _steps(folder) if step > found.progress.step]
    for path in [*later, *folder.checkpoints.glob(".*.tmp")]:
        shutil.rmtree(path, ignore_errors=True)
    if (found.path / BEST).exists():  # elastic runs may have none yet
        share(found.path / BEST, folder.best_model)


def _what_run(config: Settled) -> Record:
    """The flags that make a run what it is."""
    return {flag: value for flag, value in to_flags(config).items() if flag not in MAY_CHANGE}


def _progress(told: Any, step: int) -> Progress:
    """What a manifest tells, in which numbers that are not finite are null.

    Raises:
        CheckpointError: that is no progress to `step`.
    """
    try:
        progress = Progress(**told)
        counts = (progress.step, progress.best_step, progress.samples, progress.checkpoints)
        numbers = (progress.seconds, progress.seconds_total, progress.held_up)
        right = all(type(count) is int and count >= 0 for count in counts)
        right = right and progress.best_step <= progress.step == step
        right = right and all(type(number) in (int, float) for number in numbers)
    except TypeError:
        right = False
    if not right:
        raise CheckpointError(f"the checkpoint of step {step} is damaged (its progress is {shown(told)})")
    return progress


def path_of(folder: RunFolder, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder.checkpoints / f"step-{step:08d}"


def _steps(folder: RunFolder) -> list[int]:
    found = [path.name.removeprefix("step-") for path in folder.checkpoints.glob("step-*")]
    return sorted(int(number) for number in found if number.isdecimal())
