"""The manifest of a checkpoint: what it is of, and the length and SHA-256 of every file. It is written last."""

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlion.errors import CheckpointError

FORMAT = 2  # 1 was that of `dlion train` before there were checkpoints for everybody
NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself, in JSON: it can be read without trusting it.

    Attributes:
        method: of the optimizer. workers: how many there were. t: verdicts that were applied.
        notes: the caller's.
        files: name -> {"bytes", "sha256"} of every other file.
        written: seconds since 1970.
    """

    method: str
    workers: int
    t: int
    notes: dict[str, Any]
    files: dict[str, dict[str, Any]]
    written: float = field(default_factory=time.time)

    def write(self, folder: Path) -> None:
        """Write it to the disk."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        with (folder / NAME).open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Compare files with what is said of them here.

        Raises:
            CheckpointError: one is missing or is not what was written.
        """
        for name in names:
            try:
                found = fingerprint(folder / name)
            except OSError as error:
                raise damaged(folder, f"{name} is missing ({error.strerror})") from None
            if found != self.files[name]:
                raise damaged(folder, f"{name} is not what its manifest says")


def read_manifest(folder: Path) -> Manifest:
    """What the checkpoint in `folder` says of itself; its files are not looked at.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer version of dlion wrote it.
    """
    try:
        told: Any = json.loads((folder / NAME).read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint ({NAME}: {error.strerror}): give the folder of one; "
            "dlion.checkpoint.latest(FOLDER) finds the newest in a folder of several"
        ) from None
    except (ValueError, RecursionError):
        raise damaged(folder, f"{NAME} is not JSON") from None
    if not isinstance(told, dict) or type(told.get("format")) is not int:
        raise damaged(folder, f"{NAME} has no format")
    if told["format"] != FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {told['format']} and this version of dlion reads format {FORMAT}: "
            "take the version that wrote it, or a newer one"
        )
    kinds = {"method": str, "workers": int, "t": int, "notes": dict, "files": dict, "written": float}
    for name, kind in kinds.items():
        if type(told.get(name)) is not kind:
            raise damaged(folder, f"{name} in {NAME} is {str(told.get(name))[:50]!r}")
    if told["workers"] < 1 or not all(map(_is_file, told["files"].items())):
        raise damaged(folder, f"{NAME} lists no files of workers")
    return Manifest(**{name: told[name] for name in kinds})


def is_plain(name: Any) -> bool:
    """Whether that is the name of a file in the folder itself, other than the manifest's."""
    plain = isinstance(name, str) and name == Path(name).name and name not in ("", ".", "..", NAME)
    return plain and name.isprintable() and len(name) < 256


def _is_file(entry: tuple[str, Any]) -> bool:
    """Whether an entry names a file in the folder itself, and says how it is."""
    name, said = entry
    kinds = {"bytes": int, "sha256": str}
    return is_plain(name) and isinstance(said, dict) and {key: type(value) for key, value in said.items()} == kinds


def fingerprint(path: Path) -> dict[str, Any]:
    """Length and SHA-256 of a file.

    Raises:
        OSError: it cannot be read, or is a pipe, which a reader would wait for.
    """
    if path.is_fifo():
        raise OSError(errno.EINVAL, "a pipe and no file", str(path))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def damaged(folder: Path, what: str) -> CheckpointError:
    """The error for a checkpoint that is not what was written."""
    return CheckpointError(f"the checkpoint {folder} is damaged ({what}): take another one")


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
