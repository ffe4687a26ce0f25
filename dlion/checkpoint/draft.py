"""A checkpoint while it is written: a hidden folder, which gets its name when everything is in it and on the disk."""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlion.checkpoint.finding import put_aside
from dlion.checkpoint.manifest import NAME, Manifest, fingerprint, is_plain, sync
from dlion.checkpoint.stacked import INDEX, Part, file_of
from dlion.errors import CheckpointError, naming

Written = dict[str, Any]  # of one process, in JSON: "files" as in a manifest, and the places of what is in them


class Draft:
    """The folder beside `path` in which it is written. Every attempt has one of its own, so two runs never mix.

    It is locked as long as the attempt lives: a kill leaves it there, and the next attempt with this path deletes it.

    Attributes:
        name: of the folder; worker 0 tells it to the others, "" before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = ""
        self._held: int | None = None

    @property
    def folder(self) -> Path:
        """Where it is written."""
        return self.path.with_name(self.name)

    def open(self, files: Mapping[str, Path]) -> None:
        """Make the folder, with other files in it that stay as they are: linked, or copied where that cannot be.

        Raises:
            CheckpointError: `path` exists and is no damaged checkpoint, or a file does not exist. OSError.
        """
        if os.path.lexists(self.path) and not put_aside(self.path):
            raise _taken(self.path)
        for name, source in files.items():
            if not source.is_file():
                what = "no file" if source.exists() else "not there"
                raise CheckpointError(f"files[{name!r}], {source}, is {what}: give the path of a file")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.forget_dead()
        self._claim()
        for name, source in files.items():
            whole = source.resolve()  # a link to a symbolic link would point to nowhere from here
            try:
                os.link(whole, self.folder / name)
            except OSError:
                shutil.copyfile(whole, self.folder / name)
            sync(self.folder / name)

    def follow(self, name: Any) -> None:
        """Write into the folder that worker 0 made."""
        if not is_plain(name):
            raise CheckpointError("rank 0 did not say where it writes: use the same version of dlion everywhere")
        self.name = name

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

        Raises:
            CheckpointError: another run was quicker, or a file is elsewhere.
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
        try:
            os.replace(self.folder, self.path)  # fails where the other folder has files
        except OSError:
            if os.path.lexists(self.path):
                raise _taken(self.path) from None
            raise
        sync(self.path.parent)

    def forget_dead(self) -> None:
        """Delete what killed attempts with this path left: whose lock can be had."""
        name = re.compile(rf"\.{re.escape(self.path.name)}\.[0-9a-f]{{8}}\.tmp")
        with suppress(FileNotFoundError):
            for entry in list(self.path.parent.iterdir()):
                if name.fullmatch(entry.name):
                    with suppress(OSError):
                        held = _lock(entry)
                        shutil.rmtree(entry, ignore_errors=True)
                        os.close(held)

    def remove(self) -> None:
        """Leave nothing."""
        if self.name:
            shutil.rmtree(self.folder, ignore_errors=True)

    def release(self) -> None:
        """The attempt is over, well or not."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _claim(self) -> None:
        """Make the folder, and lock it; where the file system has no locks nobody deletes it either."""
        while self._held is None:
            self.name = f".{self.path.name}.{secrets.token_hex(4)}.tmp"
            with suppress(FileExistsError):
                self.folder.mkdir()
                try:
                    self._held = _lock(self.folder)
                except (BlockingIOError, FileNotFoundError):
                    continue  # another attempt took it for a dead one before it was locked
                except OSError:
                    return


def _lock(folder: Path) -> int:
    """The descriptor of a folder that this process has locked, until it is closed or the process ends.

    Raises:
        BlockingIOError: another one has. FileNotFoundError: it is gone. OSError: the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _taken(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} exists already: give each checkpoint a new name, or delete that one")
