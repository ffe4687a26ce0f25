"""Checkpoints of a run: complete or absent, verified before anything in them is unpickled.

    checkpoints/step-00000500/
      rank-0.pt ... rank-N.pt   each worker's momentum, buffers and byte counters (all differ between workers)
      model.safetensors         the parameters, equal on all workers
      best.safetensors          the run's model.safetensors at that time
      manifest.json             flags and progress of the run; length and SHA-256 of every file; written last

The folder gets its name when everything is in it. The last two are kept.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from dlion.train.config import to_flags
from dlion.train.json_text import from_json
from dlion.train.runs import Record, RunFolder, draft_of, finite, naming, write_whole
from dlion.train.workers import State, Workers

KEPT = 2
MODELS = ("model.safetensors", "best.safetensors")
FORMAT = 1


@dataclass
class Progress:
    """How far a run has come: everything the loop knows besides tensors."""

    step: int = 0
    loss: float | None = None
    seconds: float = 0.0
    seconds_total: float = 0.0
    best_step: int = 0
    best_loss: float | None = None
    best_accuracy: float | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found to be whole."""

    path: Path
    progress: Progress


def is_best(progress: Progress, step: int, record: Record) -> bool:
    """Whether the model of `step` has the best accuracy (without one: loss) so far, which `progress` then remembers."""
    loss, accuracy = record["val_loss"], record.get("val_accuracy")
    if accuracy is not None:
        better = progress.best_accuracy is None or accuracy > progress.best_accuracy
    else:
        better = progress.best_loss is None or loss < progress.best_loss
    if better:
        progress.best_step, progress.best_loss, progress.best_accuracy = step, loss, accuracy
    return bool(better)


def save_weights(model: nn.Module, path: Path) -> None:
    """Write a model as safetensors, whole or not at all; tensors that share memory are stored once."""
    with draft_of(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the user's umask allows; safetensors makes its files private
        try:
            save_model(model, str(temporary))
        except SafetensorError as error:
            raise _of_the_system(error, path) from error
        temporary.chmod(mode)
        _sync(temporary)


def load_weights(model: nn.Module, path: Path) -> None:
    """Read what `save_weights` wrote.

    Raises:
        ValueError: the file is missing, damaged, or of another model; the model may have changed.
    """
    try:
        load_model(model, str(path), device=str(next(model.parameters()).device))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is missing, damaged or holds another model ({reason}).") from None


def weights_of(start: Path) -> Path:
    """The file of parameters that `--init-from` names: itself, or the best model in the folder of a run."""
    return start / "model.safetensors" if start.is_dir() else start


def save(folder: RunFolder, workers: Workers, progress: Progress) -> None:
    """Write a checkpoint together with the workers of other processes.

    Raises:
        RuntimeError: the workers do not share this folder.
    """
    final = folder.checkpoints / f"step-{progress.step:08d}"
    draft = folder.checkpoints / f".{final.name}.tmp"
    if 0 in workers.here:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    workers.barrier()
    written = workers.gathered([_write_state(draft / f"rank-{rank}.pt", workers.state(rank)) for rank in workers.here])
    if 0 in workers.here:
        files = {f"rank-{rank}.pt": fingerprint for rank, fingerprint in enumerate(written)}
        save_weights(workers.model, draft / "model.safetensors")
        _share(folder.best_model, draft / "best.safetensors")
        for name in MODELS:
            files[name] = _fingerprint(draft / name)
        missing = [name for name in files if not (draft / name).is_file()]
        if missing:
            raise RuntimeError(f"{missing[0]} is not in {draft}: all workers must see the same --out folder.")
        state = {key: finite(value) for key, value in asdict(progress).items()}
        manifest = {"format": FORMAT, "run": _what_run(folder), "progress": state, "files": files}
        write_whole(draft / "manifest.json", json.dumps(manifest, indent=1).encode())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(draft, final)
        _sync(folder.checkpoints)
        for old in _all(folder)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    workers.barrier()


def _of_the_system(error: SafetensorError, path: Path) -> Exception:
    """What the system said, as Python's own writing would raise it: "... (os error 28)" is a full disk."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else error


def _write_state(path: Path, state: State) -> dict[str, Any]:
    """Write one worker's own state; the fingerprint of the file."""
    with naming(path), path.open("wb") as file:  # given a path, torch says of a full disk that a position is wrong
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return _fingerprint(path)


def _what_run(folder: RunFolder) -> Record:
    """The flags that make a run what it is: it may be lengthened, and its data may lie elsewhere."""
    flags = to_flags(folder.read_config())
    return {flag: value for flag, value in flags.items() if flag not in ("steps", "data")}


def latest(folder: RunFolder, workers: int) -> Checkpoint:
    """The newest checkpoint of a run of so many workers, after comparing every file with its manifest.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    found = _all(folder)
    if not found:
        raise ValueError(f"{folder.path} has no checkpoint to resume from: start it again without --resume.")
    path = found[-1]
    advice = (
        f"delete {path} to resume from the checkpoint before it"
        if len(found) > 1
        else "start the run again without --resume"
    )
    try:
        manifest = from_json((path / "manifest.json").read_bytes())
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']!r} is not {FORMAT}, the one this version of dlion reads")
        if manifest["run"] != _what_run(folder):
            raise ValueError("it belongs to a run with other flags than config.toml says")
        progress = _progress(manifest["progress"])
        files: dict[str, dict[str, Any]] = manifest["files"]
        broken = next((name for name in _names(workers) if _fingerprint(path / name) != files.get(name)), None)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the checkpoint {path} is damaged ({type(error).__name__}: {error}): {advice}.") from None
    if broken:
        raise ValueError(f"the checkpoint {path} is damaged ({broken} is not what its manifest says): {advice}.")
    return Checkpoint(path, progress)


def restore(checkpoint: Checkpoint, workers: Workers) -> None:
    """Put the workers of this process back where they were when the checkpoint was written."""
    load_weights(workers.model, checkpoint.path / "model.safetensors")
    for rank in workers.here:
        state = torch.load(checkpoint.path / f"rank-{rank}.pt", map_location="cpu", weights_only=True)
        workers.restore(rank, state)


def rewind(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Undo what the run wrote after this checkpoint, so that going on writes it again."""
    folder.forget_from(checkpoint.progress.step)
    for outdated in (folder.summary_file, folder.report_file, folder.last_model, folder.failure_log):
        outdated.unlink(missing_ok=True)
    _share(checkpoint.path / "best.safetensors", folder.best_model)


def _names(workers: int) -> list[str]:
    return [*(f"rank-{rank}.pt" for rank in range(workers)), *MODELS]


def _progress(told: dict[str, Any]) -> Progress:
    """What a manifest tells, in which numbers that are not finite are null."""
    progress = Progress(**told)
    counts = (progress.step, progress.best_step)
    numbers = (progress.seconds, progress.seconds_total)
    if not all(type(count) is int and 0 <= count <= progress.step for count in counts):
        raise ValueError(f"its steps are {counts}")
    if not all(isinstance(number, (int, float)) for number in numbers):
        raise ValueError(f"its seconds are {numbers}")
    return progress


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _share(source: Path, target: Path) -> None:
    """Give `target` the content of `source` without copying: files of a run are replaced, never changed."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _all(folder: RunFolder) -> list[Path]:
    found = [path for path in folder.checkpoints.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
