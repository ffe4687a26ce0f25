"""Which checkpoints there are, and whether they are whole: nothing is unpickled, and no other worker is asked."""

import warnings
from itertools import count
from pathlib import Path

from dlion.checkpoint.arguments import checked_path
from dlion.checkpoint.manifest import NAME, Manifest, read_manifest
from dlion.errors import CheckpointError

Folder = str | Path


def verify(path: Folder) -> Manifest:
    """Compare all files of a checkpoint with its manifest, which is returned. Nothing is unpickled.

    Raises:
        CheckpointError: it is not there, not complete or damaged.
    """
    folder = checked_path("path", path)
    manifest = read_manifest(folder)
    manifest.check(folder, manifest.files)
    return manifest


def is_complete(path: Folder) -> bool:
    """Whether there is a checkpoint, with all files as they were written. CheckpointError: `path` is no path."""
    folder = checked_path("path", path)
    try:
        verify(folder)
    except CheckpointError:
        return False
    return True


def latest(folder: Folder) -> Path | None:
    """The newest complete checkpoint among those in `folder`, None where there is none; warns of damaged ones.

    The newest is the one of most steps, and among equals the one written last. CheckpointError: `folder` is no path.
    """
    found = []
    for path in checked_path("folder", folder).glob(f"*/{NAME}"):
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


def put_aside(path: Path) -> bool:
    """Give a damaged checkpoint another, hidden name, so that its own is free; whether `path` was one.

    What is whole, or no checkpoint with a manifest that can be read, stays where it is.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return False
    try:
        manifest.check(path, manifest.files)
    except CheckpointError as error:
        aside = next(name for k in count(1) if not (name := path.with_name(f".{path.name}.damaged-{k}")).exists())
        path.rename(aside)
        warnings.warn(f"{error}: it is {aside} now, and a new one gets its name", stacklevel=2)
        return True
    return False
