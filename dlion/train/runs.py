"""The folder of a run: its name, its configuration, its metrics and its results.

runs/NAME/
  config.toml              the flags; `dlion train --config` of this file repeats the run
  metrics.jsonl            one object per logged step
  summary.json             the results, written when the run is finished
  model.safetensors        the model with the best validation metric so far
  model-last.safetensors   the model after the last step
  report.html              curves and tables
  checkpoints/             what `--resume` needs (see checkpoints.py)
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w

from dlion.errors import naming
from dlion.train.config import Settled, from_flags, read_toml, to_flags
from dlion.train.elastic_flags import KEPT
from dlion.train.json_text import from_json

Record = dict[str, Any]
NOT_ELASTIC: Mapping[str, Any] = {}


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, never meets half of it."""
    with naming(path), draft_of(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, which becomes `path` at the end, or is deleted if that does not come."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class RunFolder:
    """The files of one run. Only rank 0 writes here, except for each worker's own file in a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.metrics_file = path / "metrics.jsonl"
        self.summary_file = path / "summary.json"
        self.best_model = path / "model.safetensors"
        self.last_model = path / "model-last.safetensors"
        self.report_file = path / "report.html"
        self.failure_log = path / "failure.log"
        self.checkpoints = path / "checkpoints"
        self._held: int | None = None

    @classmethod
    def create(
        cls, out: Path, name: str | None, config: Settled, elastic: Mapping[str, Any] = NOT_ELASTIC
    ) -> "RunFolder":
        """Make the folder of a new run and write its configuration.

        Args:
            out: The folder of all runs; made when it is missing.
            name: Name of the run. None takes the first free `TASK-METHOD-nN-sSEED[-k]`, k = 2, 3, ...
                The folder is made exclusively, so two commands started at once never share one.
            elastic: as in `write_config`.

        Raises:
            ValueError: `name` is taken by another run, or is not the name of a folder.
        """
        if name is not None and (name != Path(name).name or name in {"", ".", ".."} or not name.isprintable()):
            raise ValueError(
                f"--name must be the name of a folder inside --out, without control characters, and {name!r} was given."
            )
        out.mkdir(parents=True, exist_ok=True)
        folder = cls(first_free(out, _stem(config)) if name is None else _claim(out / name, config))
        folder.hold()
        try:
            folder.write_config(config, elastic)
        except BaseException:
            folder.release()
            with suppress(OSError):
                folder.path.rmdir()  # it is empty
            raise
        return folder

    @classmethod
    def existing(cls, path: Path) -> "RunFolder":
        """The folder of a run that was started before.

        Raises:
            ValueError: there is no run in `path`.
        """
        folder = cls(path)
        if not folder.config_file.is_file():
            raise ValueError(
                f"{path} holds no run (it has no config.toml): give the folder that `dlion train` reported."
            )
        return folder

    def hold(self) -> None:
        """Keep every other command from training into this folder, as long as this process or a fork of it lives.

        Where the file system has no locks nothing is held.

        Raises:
            ValueError: another command does.
        """
        self._held = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ValueError(
                f"another command is training in {self.path}: wait for its end, or stop it, or take another --name."
            ) from None
        except OSError:
            self.release()

    def release(self) -> None:
        """The opposite of `hold`; forks hold on until they end."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other process is inside; who dies there lets the next one in."""
        with self.config_file.open("rb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def write_config(self, config: Settled, elastic: Mapping[str, Any] = NOT_ELASTIC) -> None:
        """Replace `config.toml`.

        Args:
            elastic: flags of an elastic run, which goes on as one when it is resumed.
        """
        write_whole(self.config_file, tomli_w.dumps(to_flags(config) | dict(elastic)).encode())

    def read_config(self) -> Settled:
        """The configuration the run was started with.

        Raises:
            ValueError: `config.toml` was damaged or edited into something that is not a run.
        """
        try:
            flags = read_toml(self.config_file)
            return from_flags({flag: value for flag, value in flags.items() if flag not in KEPT})
        except ValueError as error:
            raise ValueError(f"{self.config_file} does not describe a run: {str(error).rstrip('.')}.") from None

    def check_seen_by(self, rank: int) -> None:
        """Raise a ValueError where this rank does not see the folder that rank 0 has made."""
        if not self.config_file.exists():
            raise ValueError(
                f"rank {rank} does not see {self.path.absolute()}, which rank 0 has made: give --out a folder that all "
                "workers see, since each writes its part of a checkpoint into it."
            )

    def append(self, record: Record) -> None:
        """Add one line to `metrics.jsonl`; numbers that are not finite become null, as JSON has no word for them."""
        line = json.dumps({key: finite(value) for key, value in record.items()}, allow_nan=False)
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def records(self) -> list[Record]:
        """The lines of `metrics.jsonl`; a last line cut short by a crash is left out.

        Raises:
            ValueError: a line is no record.
        """
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_bytes().split(b"\n")
        return [self._record(line, number) for number, line in enumerate(lines[:-1], 1)]

    def _record(self, line: bytes, number: int) -> Record:
        record: Any
        try:
            record = from_json(line)
        except ValueError:
            record = None
        if not (isinstance(record, dict) and type(record.get("step")) is int):
            raise ValueError(f"line {number} of {self.metrics_file} is damaged: mend or delete that line.")
        whole: Record = record
        return whole

    def forget_from(self, step: int) -> None:
        """Drop the records of `step` and later, which a resumed run writes again."""
        kept = [record for record in self.records() if record["step"] < step]
        write_whole(self.metrics_file, "".join(json.dumps(record) + "\n" for record in kept).encode())

    def write_summary(self, summary: Record) -> None:
        """Write `summary.json`; it exists only while the run is finished."""
        whole = {key: finite(value) for key, value in summary.items()}
        write_whole(self.summary_file, (json.dumps(whole, indent=2, allow_nan=False) + "\n").encode())

    def read_summary(self) -> Record:
        """The results of a finished run.

        Raises:
            ValueError: the run is not finished.
        """
        if not self.summary_file.is_file():
            raise ValueError(f"{self.path} is not finished: continue it with `dlion train --resume {self.path}`.")
        summary: Any
        try:
            summary = from_json(self.summary_file.read_bytes())
        except ValueError:
            summary = None
        if not _is_summary(summary):
            raise ValueError(
                f"{self.summary_file} is damaged: delete it and let `dlion train --resume {self.path}` write it again."
            )
        whole: Record = summary
        return whole


def _is_summary(value: Any) -> bool:
    """Whether what was read holds what `dlion eval` needs."""
    kinds = {"steps": int, "best_step": int, "threads": int, "device": str, "data": dict}
    return (
        isinstance(value, dict)
        and all(type(value.get(key)) is kind for key, kind in kinds.items())
        and value["threads"] > 0
        and value["data"].keys() >= {"name", "sha256"}
    )


def finite(value: Any) -> Any:
    """`value`, or None when it is a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def differences(here: Settled, there: Settled) -> list[str]:
    """The flags in which two runs differ, as sentences' parts; where the data lies is not part of what a run is."""
    mine, theirs = to_flags(here), to_flags(there)
    flags = sorted((mine.keys() | theirs.keys()) - {"data"})
    return [
        f"--{flag} is {theirs.get(flag, 'not set')} there and {mine.get(flag, 'not set')} here"
        for flag in flags
        if mine.get(flag) != theirs.get(flag)
    ]


def _stem(config: Settled) -> str:
    return f"{config.task}-{config.method}-n{config.workers}-s{config.seed}"


def first_free(out: Path, stem: str) -> Path:
    """Make a folder in `out`: `stem`, or `stem-2`, `stem-3`, ... Exclusively, so that no two commands share one."""
    number = 1
    while True:
        path = out / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _claim(path: Path, config: Settled) -> Path:
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir() or any(path.iterdir()):
            raise ValueError(_taken(path, config)) from None
    return path


def _taken(path: Path, config: Settled) -> str:
    advice = f"take another --name, or continue it with `dlion train --resume {path}`."
    try:
        other = differences(config, RunFolder.existing(path).read_config())
    except ValueError:
        return f"{path} is taken by something that is not a run: take another --name."
    if other:
        return f"{path} holds a different run ({other[0]}): {advice}"
    return f"{path} already holds this run: {advice}"
