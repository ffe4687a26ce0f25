"""A checkpoint while it is written: a hidden folder, which gets its name when everything is in it and on the disk."""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dlion.checkpoint.manifest import NAME, Manifest, fingerprint, is_plain, sync
from dlion.checkpoint.stacked import INDEX, Part, file_of
from dlion.errors import CheckpointError, naming

Written = dict[str, Any]  # of one process, in JSON: "files" as in a manifest, and the places of what is in them


class Draft:
    """The folder beside `path` in which it is written; a kill leaves it there, and the next attempt takes its place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.with_name(f".{path.name}.tmp")

    def open(self, files: Mapping[str, Path]) -> None:
        """Make the folder, with other files in it that stay as they are: linked, or copied where that cannot be.

        Raises:
            CheckpointError: `path` exists, or a name is not one of a file beside the checkpoint's own. OSError.
        """
        if self.path.exists():
            raise CheckpointError(f"{self.path} exists already: give each checkpoint a new name, or delete that one")
        for name in files:
            if not is_plain(name) or name.startswith((".", "__")):
                raise CheckpointError(
                    f"files= has the name {name!r}: give a plain one, at most 255 printable characters, that does not "
                    f"begin with '.' or '__' and is not {NAME}"
                )
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for name, source in files.items():
            try:
                os.link(source, self.folder / name)
            except OSError:
                shutil.copyfile(source, self.folder / name)
            sync(self.folder / name)

    def write(self, parts: Iterable[Part]) -> Written:
        """Write what the workers here have."""
        written: Written = {"files": {}, "places": []}
        for part in parts:
            name = file_of(part.rank)
            with naming(self.folder / name):
                written["places"] += part.write(self.folder)
            written["files"][name] = fingerprint(self.folder / name)
        return written

    def publish(self, first: Part, about: Manifest, written: list[Written], others: Iterable[str]) -> None:
        """Write index and manifest, and give the folder its name: the last thing that is done.

        Args:
            first: worker 0's part, which has been written.
            about: a manifest without files.
            written: what all processes told.
            others: names of the files that were there from the beginning.
        """
        with naming(self.folder / INDEX):
            first.write_index(self.folder, [place for each in written for place in each["places"]])
        files = {name: said for each in written for name, said in each["files"].items()}
        for name, said in files.items():
            if not (self.folder / name).is_file() or (self.folder / name).stat().st_size != said["bytes"]:
                raise CheckpointError(f"{name} is not in {self.folder}: all workers must write to the same folder")
        for name in (INDEX, *others):
            files[name] = fingerprint(self.folder / name)
        with naming(self.folder / NAME):
            Manifest(about.method, about.workers, about.t, about.notes, files).write(self.folder)
        sync(self.folder)
        os.replace(self.folder, self.path)
        sync(self.path.parent)

    def remove(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
