"""The folder of a study: what it holds, one writer at a time, and nothing in it that may not be compared.

FOLDER/
  study.toml     the whole study, written before the first cell runs
  cells.jsonl    one line per finished cell, in the order they finished; another checkout goes on from it
  chosen.json    the settings chosen and the rule by which they were, once the grid is searched
  logs/          what each cell printed
  runs/          the run folders of cells under way
  table.md, table.csv, report.json, report.html
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlion.errors import naming
from dlion.train.compare.cells import key_of
from dlion.train.compare.study import Study, read_study, toml_of
from dlion.train.compare.wholeness import is_whole
from dlion.train.config import TrainConfig, to_flags
from dlion.train.json_text import from_json
from dlion.train.legal import shown
from dlion.train.runs import RunFolder, write_whole

Record = dict[str, Any]

COPIED = (
    *("steps", "workers", "params", "val_loss", "val_accuracy", "best_step", "best_val_loss", "best_val_accuracy"),
    *("bits_per_param_sent", "bits_per_param_received", "bytes_sent", "bytes_received", "ratio", "abstentions"),
    *("seconds", "device", "threads", "kernels", "versions", "data"),
)
# Equal in all cells of a folder, beside the data of equal flags and the configuration (see `_fixed`).
SHARED = ("versions", "device", "threads")
PATHS = ("data", "init-from")  # where things lie is no configuration
DEFAULTS = to_flags(TrainConfig()).keys()


class StudyFolder:
    """The files of one study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study_file = path / "study.toml"
        self.cells_file = path / "cells.jsonl"
        self.chosen_file = path / "chosen.json"
        self.logs = path / "logs"
        self.runs = path / "runs"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other command from working on this study.

        Raises:
            ValueError: another command does.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise ValueError(f"another command works on {self.path}: wait for its end, or stop it.") from None
        finally:
            os.close(lock)

    def refuse_another(self, study: Study) -> None:
        """Check that a study is the one which the folder holds, perhaps with more to run.

        Raises:
            ValueError: the folder holds another study.
        """
        if self.study_file.exists():
            other = study.differences(read_study(self.study_file))
            if other:
                raise ValueError(
                    f"{self.path} holds a study with other settings ({other[0]}): its cells cannot be compared with "
                    "these, so take another --out."
                )
        elif self.cells_file.exists():
            raise ValueError(f"{self.path} holds cells of no known study (it has no study.toml): take another --out.")

    def claim(self, study: Study) -> None:
        """Write the study down.

        Raises:
            ValueError: the folder holds another study.
        """
        self.refuse_another(study)
        text = toml_of(study).encode()
        if not self.study_file.exists() or self.study_file.read_bytes() != text:
            write_whole(self.study_file, text)

    def records(self) -> dict[str, Record]:
        """The finished cells by key, in the order they finished. A last line cut short by a crash is left out.

        Raises:
            ValueError: a line is damaged, or two cells cannot be compared.
        """
        if not self.cells_file.exists():
            return {}
        found: dict[str, Record] = {}
        comparable = Comparable(self.path)
        for number, line in enumerate(self.cells_file.read_bytes().split(b"\n")[:-1], 1):
            record = self._record(line, number)
            comparable.admit(record)
            found[key_of(record["flags"])] = record
        return found

    def _record(self, line: bytes, number: int) -> Record:
        try:
            record: Record = from_json(line)
            if is_whole(record):
                return record
        except ValueError:
            pass
        raise ValueError(f"line {number} of {self.cells_file} is damaged: mend or delete that line.")

    def append(self, record: Record) -> None:
        """Add a finished cell and wait until it is on the disk."""
        line = json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n"
        with naming(self.cells_file), self.cells_file.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":  # a crash cut the last line short
                    whole = self.cells_file.read_bytes().rfind(b"\n") + 1
                    file.truncate(whole)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def write_chosen(self, chosen: Record) -> None:
        """Replace chosen.json."""
        write_whole(self.chosen_file, (json.dumps(chosen, indent=2, allow_nan=False) + "\n").encode())

    def digest(self) -> str:
        """Of the study as it is written down: cells say under which they were run."""
        return hashlib.sha256(self.study_file.read_bytes()).hexdigest()[:16]


def record_of(run: RunFolder, flags: Mapping[str, Any], *, epoch_steps: int, study: str) -> Record:
    """The line of a finished cell, from its run folder.

    A run whose last validation loss is no number has diverged; that is a result.
    """
    summary, config = run.read_summary(), to_flags(run.read_config())
    for path in PATHS:
        config.pop(path, None)
    evaluated = [record for record in run.records() if "val_loss" in record]
    return {
        "flags": dict(flags),
        "config": config,
        "diverged": summary["val_loss"] is None,
        **{key: summary.get(key) for key in COPIED},
        "epoch_steps": epoch_steps,
        "simulated": bool(summary.get("simulated", False)),
        "curve": {
            key: [record.get(key) for record in evaluated]
            for key in ("step", "val_loss", "val_accuracy", "bytes_sent")
            if any(key in record for record in evaluated)
        },
        "study": study,
        **({"init_sha256": _digest_of_model(Path(flags["init-from"]))} if "init-from" in flags else {}),
    }


def _digest_of_model(path: Path) -> str:
    file = RunFolder(path).best_model if path.is_dir() else path
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Comparable:
    """Cells that may stand in one table: made by the same versions, from the same data, with the same settings."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self._kinds: dict[str, Record] = {}  # one cell of each kind

    def admit(self, record: Record) -> None:
        """Take in one more.

        Raises:
            ValueError: it cannot be compared with those that are in.
        """
        kind = json.dumps([*_shared(record).values(), _data(record), _fixed(record)], sort_keys=True)
        if kind in self._kinds:
            return
        for other in self._kinds.values():
            for name, here, there in _pairs(record, other):
                if here != there:
                    raise ValueError(
                        f"a cell has {name} {shown(here)} and {self._where} holds one with {shown(there)}: they cannot "
                        "be compared, so take another --out."
                    )
        self._kinds[kind] = record


def _pairs(one: Record, other: Record) -> Iterator[tuple[str, Any, Any]]:
    mine, theirs = _shared(one), _shared(other)
    if _data(one)["asked"] == _data(other)["asked"]:
        mine["data"], theirs["data"] = _data(one)["read"], _data(other)["read"]
    mine |= _fixed(one)
    theirs |= _fixed(other)
    yield from ((name, mine[name], theirs[name]) for name in mine if name in theirs)


def _shared(record: Record) -> dict[str, Any]:
    return {name: record[name] for name in SHARED} | {"simulated": record.get("simulated", False)}


def _data(record: Record) -> dict[str, Any]:
    """What was read, and by which flags: equal ones must have read the same."""
    asked = [record["flags"].get(flag) for flag in ("task", *PATHS)]
    return {"asked": asked, "read": [record["data"], record.get("init_sha256")]}


def _fixed(record: Record) -> dict[str, Any]:
    """The configuration that nobody asked for and no method chose: defaults, which may differ between versions."""
    return {flag: value for flag, value in record["config"].items() if flag in DEFAULTS and flag not in record["flags"]}
