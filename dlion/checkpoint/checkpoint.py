"""Saving and loading: what the workers agree on, who writes which file, and when a checkpoint is complete."""

import json
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlion.channel import Channel
from dlion.checkpoint.crew import Crew, crew_of
from dlion.checkpoint.draft import Draft
from dlion.checkpoint.holdings import Holdings, check, holdings_of, in_bytes, restore
from dlion.checkpoint.manifest import NAME, Manifest, damaged, read_manifest
from dlion.checkpoint.newcomers import mean_of_workers
from dlion.checkpoint.saving import Saving
from dlion.checkpoint.stacked import Part, Stacked
from dlion.errors import CheckpointError, ranks_text
from dlion.optim import Distributed
from dlion.options import checked_timeout

Folder = str | Path


class _Alone:
    """Stands for the channel of a process whose workers are all here."""


_ALONE = _Alone()
_last: "weakref.WeakKeyDictionary[Channel | _Alone, Saving]" = weakref.WeakKeyDictionary()


def save(
    path: Folder,
    model: nn.Module,
    optimizer: Distributed,
    *,
    extra: Any = None,
    notes: Mapping[str, Any] | None = None,
    files: Mapping[str, Folder] | None = None,
    asynchronous: bool = False,
    process_group: dist.ProcessGroup | Crew | None = None,
    timeout: float | timedelta | None = None,
) -> Saving:
    """Write a checkpoint together with all other workers, to a folder that all of them see.

    It gets its name when it is complete and on the disk: a kill at any moment, or a full disk, leaves those of before.

    Args:
        path: a new folder for this checkpoint. It must not exist.
        model: whose parameters `optimizer` trains; buffers are saved for each worker.
        optimizer: a `Distributed`, `DistributedLion` or `Simulation`, whose workers are all saved here.
        extra: each worker's own, given back by `load`: numbers, text, tensors, lists and dictionaries of them. State of
            schedulers and random number generators belongs here.
        notes: worker 0's, in JSON: they stand in the manifest, and are read without unpickling.
        files: worker 0's other files to keep inside, by the names they get there. They must not change later.
        asynchronous: return as soon as everything is copied; `wait()` of what is returned says how it ended. One is
            written at a time: the next waits for it.
        process_group: the workers; None takes the optimizer's.
        timeout: seconds to wait for other workers; None takes the optimizer's.

    Raises:
        CheckpointError: on all workers, if it could not be written on any (asynchronous: from `wait()`).
        ExchangeError: a worker was lost.
    """
    started = perf_counter()
    crew = crew_of(optimizer, process_group, checked_timeout(timeout))
    _await_last(crew)
    # absolute: who saves beside training may change the folder that it works in
    draft, parts, others, failed = Draft(Path(path).absolute()), list[Part](), dict[str, Path](), None
    about = Manifest(optimizer.method, crew.size, int(optimizer.param_groups[0]["t"]), {}, {})
    try:
        about = replace(about, notes=dict(notes or {}))
        others = {name: Path(source) for name, source in (files or {}).items()}
        parts = [_part(model, optimizer, rank, crew.size, extra, asynchronous) for rank in crew.here]
        json.dumps(about.notes)
        if crew.leads:
            draft.open(others)
    except Exception as error:
        failed = error  # the others are told of it
    saving = Saving(draft.path, partial(_write, crew, draft, parts, about, list(others), failed))
    _last[crew.channel or _ALONE] = saving
    if not asynchronous:
        saving.wait()
    saving.held_up = perf_counter() - started
    return saving


def load(
    path: Folder,
    model: nn.Module,
    optimizer: Distributed,
    *,
    process_group: dist.ProcessGroup | Crew | None = None,
    timeout: float | timedelta | None = None,
) -> Any:
    """Put model and optimizer of all workers back where they were when the checkpoint was written.

    As many workers as were saved go on to the bit. Any other number (one without a process group, too) starts from
    `dlion.checkpoint.newcomers.mean_of_workers`: every worker has the mean of the saved momenta, residuals and
    buffers, and worker 0's counters and `extra`. Hyper-parameters and t are the saved ones. All workers call it.

    Never load a checkpoint of unknown origin: its index is a pickle.

    Args:
        path: of the checkpoint.
        model, optimizer: made as the saved ones were.
        process_group, timeout: as in `save`.

    Returns:
        What this worker gave as `extra` (of a simulation: worker 0's).

    Raises:
        CheckpointError: on all workers: it is not there, not complete, damaged, or of another model or method. Nothing
            has changed then. ExchangeError: a worker was lost.
    """
    folder = Path(path)
    crew = crew_of(optimizer, process_group, checked_timeout(timeout))
    found: dict[int, Holdings] = {}

    def verified() -> list[Any]:
        manifest = read_manifest(folder)
        first = crew.here[0] if crew.channel is not None else 0
        manifest.check(folder, sorted(manifest.files)[first :: crew.size if crew.channel is not None else 1])
        return [manifest.method, manifest.workers, manifest.t, manifest.written]

    def read() -> None:
        manifest = read_manifest(folder)
        if manifest.method != optimizer.method:
            raise CheckpointError(
                f"{folder} was saved with method {manifest.method!r} and the optimizer has {optimizer.method!r}: make "
                "it with the same method"
            )
        found.update(_holdings(folder, manifest, crew))
        for each in found.values():
            check(model, optimizer, each)

    told = crew.told(verified)
    strange = [rank for rank, said in enumerate(told) if said != told[0]]
    if strange:
        raise CheckpointError(f"{folder} is another checkpoint on {ranks_text(strange)} than on rank 0: give the same")
    crew.told(read)
    for rank, each in found.items():
        restore(model, optimizer, rank, each)
    return found[crew.here[0]].said["extra"]


def verify(path: Folder) -> Manifest:
    """Compare all files of a checkpoint with its manifest, which is returned. Nothing is unpickled.

    Raises:
        CheckpointError: it is not there, not complete or damaged.
    """
    manifest = read_manifest(Path(path))
    manifest.check(Path(path), manifest.files)
    return manifest


def is_complete(path: Folder) -> bool:
    """Whether there is a checkpoint, with all files as they were written."""
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def latest(folder: Folder) -> Path | None:
    """The newest complete checkpoint among those in `folder`, None where there is none; warns of damaged ones.

    The newest is the one of most steps, and among equals the one written last.
    """
    found = []
    for path in Path(folder).glob(f"*/{NAME}"):
        if not path.parent.name.startswith("."):
            try:
                manifest = read_manifest(path.parent)
                found.append((manifest.t, manifest.written, path.parent))
            except CheckpointError as error:
                warnings.warn(str(error), stacklevel=2)
    for _, _, path in sorted(found, reverse=True):
        try:
            verify(path)
            return path
        except CheckpointError as error:
            warnings.warn(str(error), stacklevel=2)
    return None


def _await_last(crew: Crew) -> None:
    last = _last.get(crew.channel or _ALONE)
    if last is None:
        return
    last.ended()
    if last.error is not None and not last.asked:
        last.asked = True
        warnings.warn(f"the last checkpoint failed, and nobody waited for it: {last.error}", stacklevel=3)


def _part(model: nn.Module, optimizer: Distributed, rank: int, workers: int, extra: Any, copied: bool) -> Part:
    """What a worker here writes: on the CPU, and copied where training goes on meanwhile."""
    held = holdings_of(model, optimizer, rank, extra)

    def kept(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: tensor.to("cpu", copy=copied).contiguous() for key, tensor in tensors.items()}

    return Part(rank, workers, kept(held.common) if rank == 0 else {}, kept(held.own), in_bytes(held.said))


def _write(
    crew: Crew, draft: Draft, parts: list[Part], about: Manifest, others: list[str], failed: Exception | None
) -> None:
    """What is done beside training, in the same order on all workers."""

    def ready() -> list[Any]:
        if failed is not None:
            raise failed
        return parts[0].form

    try:
        _compare(crew.told(ready))
        written = crew.told(lambda: draft.write(parts))
        crew.told(lambda: draft.publish(parts[0], about, written, others) if crew.leads else None)
    except CheckpointError as error:
        if crew.leads and draft.folder.exists():
            draft.remove()
        raise CheckpointError(
            f"the checkpoint {draft.path} was not written: {error} (those of before are as they were)"
        ) from error.__cause__


def _compare(forms: list[Any]) -> None:
    strange = [rank for rank, form in enumerate(forms) if form != forms[0]]
    if strange:
        mine, theirs = ({json.dumps(row) for row in forms[rank]} for rank in (0, strange[0]))
        raise CheckpointError(
            f"the state of {ranks_text(strange)} is not that of rank 0 (first difference: {min(mine ^ theirs)}): save "
            "between steps, on all workers"
        )


def _holdings(folder: Path, manifest: Manifest, crew: Crew) -> dict[int, Holdings]:
    """Of each worker here, from files that were verified."""
    try:
        stacked = Stacked(folder)
        shared = [key for key in stacked.keys if key.startswith(("parameter/", "shared/"))]
        own = [key for key in stacked.keys if key not in shared]
        common = stacked.common(shared)
        if manifest.workers == crew.size:
            return {rank: Holdings(common, stacked.rows(own, rank), stacked.said(rank)) for rank in crew.here}
        mean = mean_of_workers(stacked.rows(own, rank) for rank in range(manifest.workers))
        return {rank: Holdings(common, mean, stacked.said(0)) for rank in crew.here}
    except Exception as error:
        raise damaged(folder, f"{type(error).__name__}: {error}") from error
