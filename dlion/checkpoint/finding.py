"""Which checkpoints there are, and whether they are whole: nothing is unpickled, and no other worker is asked."""

import warnings
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
