"""Arrays that are costly to make, kept between runs in `$XDG_CACHE_HOME/dlion` (else `~/.cache/dlion`)."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


def cached_arrays(key: str, make: Callable[[], Arrays]) -> tuple[Arrays, str]:
    """The arrays stored under `key`, else those of `make()`, stored for next time; and where they are, in
    words.

    Safe for any number of processes at once: a lock lets one of them make the arrays while the others wait
    and then read; the file appears whole, by renaming. A process that dies gives its lock back. A damaged
    file is made again. If the folder cannot be written the arrays are made each time, and the words say so.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlion"
    except RuntimeError:
        return make(), "decoded for this run only (this user has no home folder, and XDG_CACHE_HOME is not set)"
    path = folder / f"{key}.npz"
    kept = f"decoded once into {path}"
    arrays = _read(path)
    if arrays is not None:
        return arrays, kept
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((folder / f"{key}.lock").open("w"))
        except OSError as error:
            return make(), f"decoded for this run only ({folder} cannot be written: {error.strerror})"
        # Where file systems have no locks every process makes the arrays; renaming still keeps the file
        # whole.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        arrays = _read(path)
        if arrays is not None:
            return arrays, kept
        arrays = make()
        try:
            _write(path, arrays)
        except OSError as error:
            return arrays, f"decoded for this run only ({path} cannot be written: {error.strerror})"
    return arrays, kept


def _read(path: Path) -> Arrays | None:
    try:
        # Opened here: np.load leaves the file open when it turns out to be no zip archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return dict(stored)
    except FileNotFoundError:
        return None
    except Exception:  # damaged archives raise nearly anything; the caller makes it again and replaces it
        return None


def _write(path: Path, arrays: Arrays) -> None:
    save: Callable[..., None] = np.savez  # its own keyword arguments differ between NumPy versions
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            save(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
