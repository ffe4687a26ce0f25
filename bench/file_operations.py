"""Counts what this process does to files in a folder, and kills it at one of these operations."""

import builtins
import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

# by their paths; writes and fsync are seen in files that were opened in the folder
NAMED = ("rename", "replace", "link", "mkdir", "unlink", "rmdir", "open")


class Operations:
    """Within, each open, write, fsync, rename, link, mkdir and unlink in `folder` is counted.

    Args:
        fatal: the number of the one at which the process kills itself: before it, or in the middle of a write.
    """

    def __init__(self, folder: Path, fatal: int | None = None) -> None:
        self.seen: list[tuple[str, str]] = []  # (operation, name of the file)
        self._folder, self._fatal = str(folder.resolve()), fatal
        self._lock = threading.Lock()
        self._kept: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "Operations":
        for name in NAMED:
            self._replace(os, name, self._named(name, getattr(os, name)))
        self._replace(os, "fsync", self._fsync(os.fsync))
        opened = self._open(builtins.open)
        self._replace(builtins, "open", opened)
        self._replace(io, "open", opened)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for owner, name, original in reversed(self._kept):
            setattr(owner, name, original)

    def count(self, operation: str, path: Any, half: Callable[[], object] = lambda: None) -> None:
        """Count one; the fatal one is the last thing that this process does."""
        with self._lock:
            self.seen.append((operation, Path(os.fsdecode(path)).name))
            if len(self.seen) == self._fatal:
                half()
                os.kill(os.getpid(), signal.SIGKILL)

    def _inside(self, path: Any) -> bool:
        return isinstance(path, (str, bytes, os.PathLike)) and os.path.abspath(os.fsdecode(path)).startswith(
            self._folder
        )

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _named(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def act(*paths: Any, **options: Any) -> Any:
            inside = [path for path in paths if self._inside(path)]
            if inside:
                self.count(name, inside[-1])
            return original(*paths, **options)

        return act

    def _fsync(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def act(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if self._inside(path):
                self.count("fsync", path)
            original(descriptor)

        return act

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def act(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if not self._inside(file):
                return original(file, mode, *rest, **options)
            self.count("open", file)
            if "b" in mode and set(mode) & set("wax"):
                return io.BufferedWriter(_Counted(file, mode.replace("b", ""), self))
            return original(file, mode, *rest, **options)

        return act


class _Counted(io.FileIO):
    """A file each of whose writes is counted, as the system gets them."""

    def __init__(self, path: Any, mode: str, operations: Operations) -> None:
        super().__init__(path, mode)
        self._operations = operations

    def write(self, data: Any) -> int:
        content = memoryview(data)
        half = content[: len(content) // 2]
        self._operations.count("write", self.name, lambda: super(_Counted, self).write(half))
        return super().write(content)
