"""`dlion train --elastic`: a lighthouse and workers on this machine, each with a supervisor that starts it again; or
one worker, at a lighthouse elsewhere.
"""

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from dlion.elastic.address import host_and_port, url_of
from dlion.elastic.quorum import LighthouseServer, check_torchft
from dlion.errors import QuorumError
from dlion.train import checkpoints
from dlion.train.config import DEFAULT_WORKERS, Settled, TrainConfig, to_flags
from dlion.train.elastic_flags import ElasticFlags
from dlion.train.elastic_task import Task
from dlion.train.found_ranks import is_found
from dlion.train.jobs import Place, check, check_same_run, point_of
from dlion.train.ranks import choose_device
from dlion.train.runs import RunFolder, differences
from dlion.train.stop_signals import StopSignals
from dlion.train.supervision import Supervision

LOOPBACK = "127.0.0.1"
KNOCK_SECONDS = 0.5  # between two attempts to reach a lighthouse that may not have begun yet


def run(config: TrainConfig, place: Place, flags: ElasticFlags) -> int:
    """Train with elastic workers; the exit status of the command, as of `launch.run`.

    Raises:
        ValueError: a mistake of the user, in one sentence; or torchft is missing.
    """
    workers = _check_flags(config, flags)
    url = url_of(flags.lighthouse) if flags.lighthouse is not None else None
    here = range(workers) if flags.worker is None else [flags.worker]
    try:
        check_torchft()
    except QuorumError as error:
        raise ValueError(f"{error}.") from None
    device = choose_device(config.device, len(here))
    settled = check(config, workers)
    if url is not None:
        _knock(url, flags.patience)
    with StopSignals() as signals, _opened(settled, place, flags) as folder:
        return 0 if folder is None else _trained(settled, folder, flags, here, device, signals)


def _check_flags(config: TrainConfig, flags: ElasticFlags) -> int:
    """How many workers there are when all are there, if the flags go together."""
    if is_found():
        raise ValueError(
            "--elastic starts its own workers: start it without torchrun or another launcher, or give --no-elastic."
        )
    if config.simulate is not None or config.overlap:
        flag = "simulate" if config.simulate is not None else "overlap"
        raise ValueError(f"--{flag} and --elastic contradict each other: leave one out, or give --no-elastic.")
    workers = config.workers or DEFAULT_WORKERS
    if flags.worker is not None and flags.worker >= workers:
        raise ValueError(f"--worker {flags.worker} must be below --workers {workers}: workers count from 0.")
    if flags.min_workers is not None and flags.min_workers > workers:
        raise ValueError(f"--min-workers {flags.min_workers} must be at most --workers {workers}.")
    return workers


def _trained(
    config: Settled,
    folder: RunFolder,
    flags: ElasticFlags,
    here: Sequence[int],
    device: Literal["cpu", "cuda"],
    signals: StopSignals,
) -> int:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dlion.train.elastic_worker"])
    alone, enough = flags.lighthouse is None, flags.min_workers or config.workers // 2 + 1
    task = Task(
        flags=to_flags(config),
        folder=str(folder.path),
        device=device,
        lighthouse=flags.lighthouse or "",
        number=0,
        local_workers=len(here),
        min_workers=flags.min_workers,
        patience=flags.patience,
        log="",
        trained="",
        go_on=f"dlion train --resume {folder.path}" if alone else "the same command",
    )
    with (
        tempfile.TemporaryDirectory(prefix="dlion-") as notes,
        _lighthouse(flags, enough) as address,
    ):
        tasks = [
            replace(task, lighthouse=address, number=n, log=f"{notes}/worker-{n}.log", trained=f"{notes}/trained-{n}")
            for n in here
        ]
        supervision = Supervision(context, folder, tasks, restarts=flags.restarts, enough=enough if alone else 1)
        return supervision.status(signals)


def _knock(url: str, seconds: float) -> None:
    """Wait until something listens where the lighthouse shall be.

    Raises:
        ValueError: nothing does within `seconds`.
    """
    ends = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection(host_and_port(url), timeout=max(0.1, ends - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() + KNOCK_SECONDS >= ends:
                raise ValueError(
                    f"nothing answered at {url} within {seconds:g} s ({error.strerror or error}): start the lighthouse "
                    "there (torchft_lighthouse), give the address of the one that runs, or more --patience."
                ) from None
        time.sleep(KNOCK_SECONDS)


@contextmanager
def _lighthouse(flags: ElasticFlags, enough: int) -> Iterator[str]:
    if flags.lighthouse is not None:
        yield flags.lighthouse
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    server = LighthouseServer(enough, host=LOOPBACK, join_timeout=flags.patience)
    try:
        yield server.address
    finally:
        server.close()


@contextmanager
def _opened(config: Settled, place: Place, flags: ElasticFlags) -> Iterator[RunFolder | None]:
    """The folder of the run, held against other commands where this one starts all workers; None if it is finished."""
    alone = flags.lighthouse is None
    if not alone and place.resume is None and place.name is None:
        raise ValueError("--lighthouse needs --name, the same for all commands: they write into one folder.")
    folder = _new(config, place, flags) if place.resume is None else RunFolder.existing(place.resume)
    if place.resume is not None:
        check_same_run(folder, config)
        if alone:
            folder.hold()
    try:
        again = place.resume is not None
        saved = any(folder.checkpoints.glob("step-*"))
        if again and alone and saved:
            goes_on = _rewound(folder, config)
        else:  # while others may be training in it
            goes_on = not _is_finished(folder, config)
            if goes_on and again and alone:
                print(f"{folder.path} has no checkpoint yet: the run begins again at step 0", flush=True)
        if goes_on:
            folder.summary_file.unlink(missing_ok=True)
            if again:
                folder.write_config(config, flags.kept())
        yield folder if goes_on else None
    finally:
        folder.release()


def _rewound(folder: RunFolder, config: Settled) -> bool:
    """Whether the run goes on; what it wrote after its last whole checkpoint is undone then."""
    found = point_of(folder, config)
    if found is None:
        return False
    checkpoints.rewind(folder, found)
    for remark in found.remarks:
        print(remark, flush=True)
    return True


def _is_finished(folder: RunFolder, config: Settled) -> bool:
    if not folder.summary_file.exists() or folder.read_summary()["steps"] < config.steps:
        return False
    print(f"{folder.path} is finished: nothing to do (a larger --steps lengthens it).")
    return True


def _new(config: Settled, place: Place, flags: ElasticFlags) -> RunFolder:
    """A new folder, or that of the same run which another command has made, at the same lighthouse."""
    alone = flags.lighthouse is None
    if not alone and (place.out / str(place.name) / "config.toml").is_file():
        folder = RunFolder(place.out / str(place.name))
        other = [text for text in differences(config, folder.read_config()) if not text.startswith("--steps ")]
        if other:
            raise ValueError(
                f"{folder.path} holds a different run ({other[0]}): take another --name, or --resume for another "
                "number of workers."
            )
        return folder
    folder = RunFolder.create(place.out, place.name, config, flags.kept())
    if not alone:
        folder.release()
    return folder
