"""Text as bytes: the running Python's standard library, or a file or folder of the user's."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dlion.train.data.sets import TextSet, expanded
from dlion.train.data.tokens import VALID_SHARE, read_token_files

# What is not the standard library proper, or is too large beside it: tests are two thirds of the bytes.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def load_text(data: str | None = None) -> TextSet:
    """Bytes (u8, vocabulary 256) or tokens, split into training and validation data.

    None: the `.py` files of the running interpreter's standard library without tests, about 11 MB. A folder:
    all its text files. In both, the tenth of the files whose content has the lowest SHA-256 is for
    validation, and files stay whole. One file: its last tenth is for validation. Token files of nanoGPT or llm.c:
    `read_token_files`. Text is held in memory, token files are mapped.

    Raises: ValueError: nothing there, or nothing readable.
    """
    if data is None:
        return _library()
    path = expanded(data)
    tokens = read_token_files(path)
    if tokens is not None:
        return tokens
    if path.is_file():
        return _one_file(path)
    if path.is_dir():
        return _folder(path)
    raise ValueError(
        f"no text at --data {data}: give a file, a folder of text files or a .bin token file, or leave it out"
    )


def _library() -> TextSet:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in _files(root, _NOT_LIBRARY) if path.suffix == ".py"]
    files = {path.relative_to(root).as_posix(): _read(path) for path in paths}
    if len(files) < 2:
        raise ValueError(f"this Python has no standard library sources in {root}; give a text with --data")
    version = platform.python_version()
    return _split_by_file(
        files, f"standard library of Python {version}", f"sources of Python {version}'s standard library"
    )


def _folder(root: Path) -> TextSet:
    found = {path.relative_to(root).as_posix(): _read(path) for path in _files(root, {"__pycache__"})}
    files = {name: content for name, content in found.items() if content and b"\0" not in content[:8192]}
    if not files:
        raise ValueError(f"--data {root} holds no text files; give a folder with at least one, or a file")
    skipped = f" ({len(found) - len(files):,} empty or binary files left out)" if len(files) < len(found) else ""
    if len(files) == 1:
        (content,) = files.values()
        return _split_at_the_end(content, root.name, f"the only text file of {root}{skipped}")
    return _split_by_file(files, root.name, f"text files of {root}{skipped}")


def _files(root: Path, without: set[str]) -> Iterator[Path]:
    """The files below `root`, sorted; hidden ones and the folders called as in `without` are left out."""
    for folder, folders, names in os.walk(root):
        # In place and while walking: a sorted() around os.walk would descend everywhere first.
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not name.startswith("."):
                yield path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions") from None


def _split_by_file(files: dict[str, bytes], name: str, what: str) -> TextSet:
    # By content, so that copies of a file land on the same side more often than not, and the split is the
    # same everywhere.
    by_hash = sorted(files, key=lambda file: (hashlib.sha256(files[file]).digest(), file))
    valid_names = set(by_hash[: max(1, len(files) // VALID_SHARE)])
    train = b"".join(content for file, content in files.items() if file not in valid_names)
    valid = b"".join(content for file, content in files.items() if file in valid_names)
    note = (
        f"{what}: {len(files) - len(valid_names):,} files ({len(train):,} bytes) to train, "
        f"{len(valid_names):,} files ({len(valid):,} bytes) to validate, split by the hash of each file"
    )
    return _bytes_set(name, note, train, valid)


def _one_file(path: Path) -> TextSet:
    return _split_at_the_end(_read(path), path.name, str(path))


def _split_at_the_end(content: bytes, name: str, what: str) -> TextSet:
    cut = len(content) - len(content) // VALID_SHARE
    note = f"{what}: the first {cut:,} bytes to train, the last {len(content) - cut:,} to validate"
    return _bytes_set(name, note, content[:cut], content[cut:])


def _bytes_set(name: str, note: str, train: bytes, valid: bytes) -> TextSet:
    sha = hashlib.sha256(train)
    sha.update(valid)
    return TextSet(
        name,
        sha.hexdigest(),
        note,
        "byte",
        256,
        np.frombuffer(train, np.uint8),
        np.frombuffer(valid, np.uint8),
    )
