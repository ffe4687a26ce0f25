"""Saving and loading: what the workers agree on, who writes which file, and when a checkpoint is complete."""

import warnings
import weakref
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist
from torch import nn

from dlion.channel import Channel
from dlion.checkpoint.arguments import Order, checked_path, checked_workers
from dlion.checkpoint.chunks import Chunk
from dlion.checkpoint.crew import Crew, crew_of
from dlion.checkpoint.draft import Draft
from dlion.checkpoint.finding import Folder
from dlion.checkpoint.fit import check_between_steps, check_fit
from dlion.checkpoint.holdings import Holdings, holdings_of, in_bytes, restore
from dlion.checkpoint.manifest import Manifest, read_manifest
from dlion.checkpoint.mesh import check_seats
from dlion.checkpoint.readiness import Readiness, agreed, held_before
from dlion.checkpoint.reading import found_by
from dlion.checkpoint.saving import Saving
from dlion.checkpoint.stacked import Part, object_of
from dlion.errors import CheckpointError, ExchangeError, ranks_text
from dlion.ops.bits import checksum
from dlion.optim import Distributed
from dlion.sharding import is_sharded, put_back_shards


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
        model: whose parameters `optimizer` trains; buffers are saved for each worker. Sharded by FSDP2, all ranks that
            hold its shards take part, each with `extra` and buffers of its own.
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
        optimizer._renewal.refuse_trouble()
        put_back_shards(model)
        parts = [_part(model, optimizer, crew, worker, extra, asynchronous) for worker in crew.here]
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

    A sharded model takes its parts out of what any other mesh, or a whole model, has saved. In other shards as many
    workers each have their own momenta, the mean of the buffers of their ranks, and the `extra` of their first rank.

    Nothing is converted but momenta, to the optimizer's own `momentum_dtype`.

    Never load a checkpoint of unknown origin: its index is a pickle.

    Args:
        path: of the checkpoint.
        model, optimizer: made as the saved ones were.
        process_group, timeout: as in `save`.

    Returns:
        What this worker, or this rank of it, gave as `extra` (of a simulation: worker 0's).

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
        mine, everyone = (crew.channel.rank, crew.channel.size) if crew.channel is not None else (0, 1)
        manifest.check(folder, sorted(manifest.files)[mine::everyone])
        return [crew.seat, [manifest.method, manifest.workers, manifest.t, manifest.written]]

    def read() -> None:
        manifest = read_manifest(folder)
        if manifest.method != optimizer.method:
            raise CheckpointError(
                f"{folder} was saved with method {manifest.method!r} and the optimizer has {optimizer.method!r}: make "
                "it with the same method"
            )
        put_back_shards(model)
        found.update(found_by(crew, folder, manifest, model))
        for each in found.values():
            check_fit(model, optimizer, each)
        check_between_steps(optimizer, "loaded")

    def restored() -> None:
        for rank, each in found.items():
            restore(model, optimizer, rank, each)

    seats, told = zip(*crew.told("load", verified), strict=True)
    check_seats(seats, crew.ranks)
    strange = [rank for rank, said in zip(crew.ranks, told, strict=True) if said != told[0]]
    if strange:
        raise CheckpointError(
            f"{folder} is another checkpoint on {ranks_text(strange)} than on rank {crew.ranks[0]}: give the same"
        )
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


def _part(model: nn.Module, optimizer: Distributed, crew: Crew, worker: int, extra: Any, copied: bool) -> Part:
    """What a process writes for a worker here: on the CPU, and copied where training goes on meanwhile."""
    held = holdings_of(model, optimizer, worker, extra)
    number = crew.number(worker)
    sharded = {key for key, tensor in (held.common | held.own).items() if is_sharded(tensor)}
    everything = {key: Chunk.of(tensor) for key, tensor in held.common.items()}
    told = everything.items() if crew.channel is not None else ()  # alone there is nobody to compare with
    shared = [[key, list(chunk.offset), checksum([chunk.values])] for key, chunk in told]
    common = {key: chunk for key, chunk in everything.items() if number == 0 or key in sharded}
    own = {
        # what is not sharded each process of a worker has for itself
        key: Chunk.of(tensor).row(*((worker, crew.size) if key in sharded else (number, crew.size * crew.shards)))
        for key, tensor in held.own.items()
    }
    common, own = ({key: chunk.on_cpu(copied) for key, chunk in chunks.items()} for chunks in (common, own))
    return Part(number, common, own, sharded, shared, object_of(worker, crew.shard), in_bytes(held.said))


def _write(
    crew: Crew, draft: Draft, parts: list[Part], about: Manifest, others: list[str], failed: Exception | None
) -> None:
    """What is done beside training, in the same order on all workers."""

    def ready() -> Readiness:
        if failed is not None:
            raise failed
        form: list[list[Any]] = [["t", about.t], ["method", about.method], *parts[0].form]
        return Readiness(draft.path.name, draft.name, crew.seat, form, parts[0].held, parts[0].shared)

    try:
        told = [Readiness(*said) for said in crew.told("save", ready)]
        draft.follow(agreed(told, crew.ranks))
        if crew.channel is not None:
            parts[0].leave_out(held_before(told, crew.channel.rank))
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
