"""The runs behind the quality table: one cell is one `dlion train`, one line of cells.jsonl once finished.

A folder holds runs of one task under one set of settings, so that its numbers may be compared. Work on it can
stop at any time: finished cells are kept and not run again.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from documents import write_whole

Record = dict[str, Any]


class QualityError(Exception):
    """A sentence for the user."""


@dataclass(frozen=True)
class Settings:
    """What all cells of a folder share. `flags` go to `dlion train` as they are."""

    task: str
    steps: int
    workers: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One training run."""

    method: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-lr{self.lr:g}-s{self.seed}"


# (settings, cell, folder, seconds left or None) -> the fields that `finished` lists.
Runner = Callable[[Settings, Cell, Path, float | None], Record]

# What a runner reports of a finished cell, beside method, lr, seed, steps and workers.
FIELDS = (
    "val_loss",
    "val_accuracy",
    "bits_per_param_sent",
    "ratio",
    "seconds",
    "data_sha256",
    "versions",
    "config",
)
# These must be equal in all cells of a folder.
SHARED = ("data_sha256", "versions", "config")


def claim_folder(folder: Path, settings: Settings) -> None:
    """Make the folder for these settings, or check that it is theirs.

    Raises: QualityError when it holds runs with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    if not path.exists():
        write_whole(path, json.dumps(asdict(settings), indent=2) + "\n")
        return
    held = read_settings(folder)
    for name, wanted in asdict(settings).items():
        has = getattr(held, name)
        if has != wanted:
            raise QualityError(
                f"{folder} holds runs with {name}={has!r} and you asked for {name}={wanted!r}: "
                "take the same settings or another --out."
            )


def read_settings(folder: Path) -> Settings:
    """The settings of the folder's cells. Raises: QualityError when the folder holds none."""
    try:
        held = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        return Settings(**{**held, "flags": tuple(held["flags"])})
    except FileNotFoundError:
        raise QualityError(f"{folder} holds no runs of this script: name the folder given to --out.") from None
    except (ValueError, TypeError, KeyError) as error:
        raise QualityError(f"{folder / 'settings.json'} is damaged ({error}): remove the folder.") from None


def read_cells(folder: Path) -> list[Record]:
    """The finished cells in the order they finished. A last line not written whole is cut off the file.

    Raises: QualityError on a damaged line that is not the last.
    """
    path = folder / "cells.jsonl"
    if not path.exists():
        return []
    records: list[Record] = []
    good_bytes = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no end of line")
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise QualityError(f"{path}, line {number} is damaged ({error}): mend or remove it.") from None
            os.truncate(path, good_bytes)
        good_bytes += len(line)
    return records


def append_cell(folder: Path, record: Record) -> None:
    """Add one finished cell and wait until it is on the disk."""
    with (folder / "cells.jsonl").open("ab") as file:
        file.write(json.dumps(record, sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def key(record: Record) -> Cell:
    return Cell(record["method"], float(record["lr"]), int(record["seed"]))


def check_comparable(record: Record, others: Iterable[Record], folder: Path) -> None:
    """Raises: QualityError when data, versions or configuration are not those of the folder's other cells."""
    for other in others:
        for name in SHARED:
            if record[name] != other[name]:
                raise QualityError(
                    f"this run's {name} is {record[name]} and {folder} holds runs with {other[name]}: "
                    "they cannot be compared, so take another --out."
                )


def run_cells(
    settings: Settings,
    cells: Iterable[Cell],
    folder: Path,
    run: Runner,
    *,
    limit_seconds: float = math.inf,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run the cells that have not finished yet. True: all have finished; False: the time was up before.

    No cell is started that would, by the longest so far, end after `limit_seconds`.
    """
    claim_folder(folder, settings)
    records = read_cells(folder)
    done = {key(record) for record in records}
    todo = [cell for cell in cells if cell not in done]
    began = clock()
    longest = 0.0
    for number, cell in enumerate(todo, start=1):
        started = clock()
        left = limit_seconds - (started - began)
        if left <= longest:
            say(f"Time is up with {len(todo) - number + 1} cells to go: the same command goes on.")
            return False
        try:
            result = run(settings, cell, folder, None if math.isinf(left) else left)
        except TimeoutError:
            say(f"Time is up in {cell.name}, {len(todo) - number + 1} cells to go: the same command goes on.")
            return False
        longest = max(longest, clock() - started)
        record = {
            **asdict(cell),
            "steps": settings.steps,
            "workers": settings.workers,
            **{name: result[name] for name in FIELDS},
        }
        check_comparable(record, records, folder)
        append_cell(folder, record)
        records.append(record)
        say(f"[{number}/{len(todo)}] {cell.name}: val_loss {record['val_loss']}, {record['seconds']} s")
    return True
