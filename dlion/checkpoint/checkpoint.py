"""Saving and loading: what the workers agree on, who writes which file, and when a checkpoint is complete."""

import json
import warnings
import weakref
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dlion.channel import Channel
from dlion.checkpoint.arguments import Order, checked_path, checked_workers
from dlion.checkpoint.crew import Crew, crew_of
from dlion.checkpoint.draft import Draft
from dlion.checkpoint.finding import Folder
from dlion.checkpoint.fit import check_between_steps, check_fit
from dlion.checkpoint.holdings import Holdings, holdings_of, in_bytes, restore
from dlion.checkpoint.manifest import Manifest, damaged, read_manifest
from dlion.checkpoint.newcomers import mean_of_workers
from dlion.checkpoint.saving import Saving
from dlion.checkpoint.stacked import Part, Stacked
from dlion.errors import CheckpointError, ExchangeError, ranks_text
from dlion.optim import Distributed
from dlion.quoting import one_line

SHOWN = 500  # letters of what torch says of files that it cannot read


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
        path: a new folder for this checkpoint, with the same name on all workers. It must not exist.
        model: whose parameters `optimizer` trains; buffers are saved for each worker.
        optimizer: a `Distributed`, `DistributedLion` or `Simulation`, whose workers are all saved here.
        extra: each worker's own, given back by `load`: numbers, text, tensors, lists and dictionaries of them. State of
            schedulers and random number generators belongs here.
        notes: worker 0's, in JSON: they stand in the manifest, and are read without unpickling.
        files: worker 0's other files to keep inside, by the names they get there: linked (what a symbolic link points
            to), or copied where that cannot be. They must not change later.
        asynchronous: return as soon as everything is copied; `wait()` of what is returned says how it ended. One is
            written at a time: the next waits for it.
        process_group: the workers; None takes the optimizer's (of `Elastic` those of its round).
        timeout: seconds to wait for other workers; None takes the optimizer's.

    Raises:
        CheckpointError: on all workers, if it could not be written on any, or an argument of one is no good
            (asynchronous: from `wait()`; on the worker with that argument at once).
        ExchangeError: a worker was lost.
    """
    started = perf_counter()
    wrong: Exception | None = None
    try:
        order = Order.checked(path, model, optimizer, notes, files, asynchronous, process_group, timeout)
    except Exception as error:
        order, wrong = Order(Path(), {}, {}, None), error
    crew = _met("save", optimizer, process_group, order.patience, wrong)
    draft, parts, failed = Draft(order.path), list[Part](), None
    about = Manifest(optimizer.method, crew.size, int(optimizer.param_groups[0]["t"]), order.notes, {})
    try:
        check_between_steps(optimizer, "saved")
        parts = [_part(model, optimizer, rank, crew.size, extra, asynchronous) for rank in crew.here]
        if crew.leads:
            draft.open(order.files)
    except Exception as error:
        failed = error  # the others are told of it
    saving = Saving(order.path, partial(_write, crew, draft, parts, about, list(order.files), failed))
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
    buffers, and worker 0's counters and `extra`. Hyper-parameters and t are the saved ones. All workers call it; those
    of `Elastic` each by itself.

    Nothing is converted but momenta, to the optimizer's own `momentum_dtype`.

    Never load a checkpoint of unknown origin: its index is a pickle.

    Args:
        path: of the checkpoint.
        model, optimizer: made as the saved ones were.
        process_group, timeout: as in `save`.

    Returns:
        What this worker gave as `extra` (of a simulation: worker 0's).

    Raises:
        CheckpointError: on all workers: it is not there, not complete, damaged, of another model or method, or an
            argument of one is no good. Nothing has changed then. ExchangeError: a worker was lost.
    """
    wrong: Exception | None = None
    folder, patience = Path(), None
    try:
        folder = checked_path("path", path)
        patience = checked_workers(model, optimizer, process_group, timeout)
    except Exception as error:
        wrong = error
    crew = _met("load", optimizer, process_group, patience, wrong)
    found = _take_up(folder, crew, model, optimizer)
    return found[crew.here[0]].said["extra"]


def _take_up(folder: Path, crew: Crew, model: nn.Module, optimizer: Distributed) -> dict[int, Holdings]:
    """Verify a checkpoint, compare it with model and optimizer, and put them where they were: what each one had."""
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
            check_fit(model, optimizer, each)
        check_between_steps(optimizer, "loaded")

    def restored() -> None:
        for rank, each in found.items():
            restore(model, optimizer, rank, each)

    told = crew.told("load", verified)
    strange = [rank for rank, said in enumerate(told) if said != told[0]]
    if strange:
        raise CheckpointError(f"{folder} is another checkpoint on {ranks_text(strange)} than on rank 0: give the same")
    crew.told("load", read)
    crew.told("load", restored)
    return found


def _met(call: str, optimizer: Any, group: Any, patience: timedelta | None, wrong: Exception | None) -> Crew:
    """The workers, where `call` may begin; what is wrong with an argument of this one, all of them raise."""

    def refuse() -> None:
        assert wrong is not None
        raise wrong

    try:
        crew = crew_of(optimizer, group, patience, loading=call == "load")
        last = _last.get(crew.channel or _ALONE)
        if last is not None:
            last.ended()  # calls of two checkpoints would mix
            wrong = wrong or _asked_after(last)
        if crew.channel is not None and crew.patience is not None:
            crew.channel.wait_at_most(crew.patience)
        if wrong is not None:
            crew.told(call, refuse)
    except ExchangeError:
        if wrong is not None:
            raise wrong from None  # nobody came to hear of it
        raise
    return crew


def _asked_after(last: Saving) -> Warning | None:
    """Warn of a checkpoint that failed unheard; the warning, where it is an error here, and perhaps here alone."""
    if last.error is not None and not last.asked:
        last.asked = True
        try:
            warnings.warn(f"the last checkpoint failed, and nobody waited for it: {last.error}", stacklevel=4)
        except Warning as warning:
            return warning
    return None


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
        return [draft.path.name, draft.name, [["t", about.t], ["method", about.method], *parts[0].form]]

    try:
        told = crew.told("save", ready)
        _compare(told)
        draft.follow(told[0][1])
        written = crew.told("save", lambda: draft.write(parts))
        crew.told("save", lambda: draft.publish(parts[0], about, written, others) if crew.leads else None)
    except CheckpointError as error:
        raise CheckpointError(
            f"the checkpoint {draft.path} was not written: {error} (those of before are as they were)"
        ) from error.__cause__
    except ExchangeError:
        draft.forget_dead()  # worker 0 may be the one that was lost
        raise
    finally:
        if crew.leads:
            draft.remove()  # nothing, where it has got its name
        draft.release()


def _compare(told: list[Any]) -> None:
    """Of each worker the name of the checkpoint, that of its draft, and the form of what it writes."""
    for rank, (name, _, _) in enumerate(told):
        if name != told[0][0]:
            raise CheckpointError(f"rank {rank} saves {name!r} and rank 0 {told[0][0]!r}: give all workers one path")
    forms = [form for _, _, form in told]
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
        raise damaged(folder, f"{type(error).__name__}: {one_line(str(error), SHOWN)}") from error
