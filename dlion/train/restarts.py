"""Restarts by torchrun: workers that it starts again go on in the folder of their run, from its last checkpoint.

torchrun starts all workers again, with the same command, when one of them or a whole node is lost
(`--nnodes 1:4 --max-restarts 3`). A note in the folder of all runs says which run they had begun.
"""

import os
from dataclasses import replace
from pathlib import Path

from dlion.train.config import Settled
from dlion.train.jobs import Job, Place, open_run
from dlion.train.runs import RunFolder, write_whole

NO_NAME = "none"  # what torchrun calls a group of nodes whose --rdzv-id was not given


def open_or_go_on(config: Settled, place: Place) -> Job | None:
    """As `open_run`; but workers that torchrun has started again go on with their run.

    Before the first checkpoint they begin anew, in the same folder.
    """
    note = _note(place.out)
    if note is None or place.resume is not None:
        return open_run(config, place)
    folder = RunFolder(place.out / note.read_text("utf-8")) if _restarted(note) else None
    if folder is None or not folder.config_file.is_file():
        job = open_run(config, place)
        if job is not None:
            write_whole(note, job.folder.path.name.encode())
        return job
    if any(folder.checkpoints.glob("step-*")):
        return open_run(config, replace(place, name=None, resume=folder.path))
    folder.hold()
    folder.write_config(config)
    folder.forget_from(0)
    return Job(config, folder)


def _note(out: Path) -> Path | None:
    """Where the name of the run stands that these workers have begun; None where torchrun did not start them."""
    group = os.environ.get("TORCHELASTIC_RUN_ID")
    return out / f".torchrun-{group.replace('/', '_')}" if group else None


def _restarted(note: Path) -> bool:
    """Whether these workers had begun a run before.

    A group of nodes that has a name of its own begins one run. Those without may be of another command, unless torchrun
    counts restarts.
    """
    own_name = os.environ["TORCHELASTIC_RUN_ID"] != NO_NAME
    return note.is_file() and (own_name or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
