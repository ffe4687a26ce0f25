"""What callers give, looked at before anything is done: one sentence about the first that is no good."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

from dlion.checkpoint.crew import Crew, check_workers
from dlion.checkpoint.manifest import NAME, is_plain
from dlion.errors import CheckpointError
from dlion.optim import Distributed
from dlion.options import check_process_group, checked_timeout
from dlion.quoting import one_line, shown

SHOWN = 100  # letters of what was given
LONGEST_NAME = 240  # bytes: while it is written the folder's name has 14 more, and file systems allow 255


@dataclass(frozen=True)
class Order:
    """What `save` was asked for, beside model and optimizer.

    Attributes:
        path: absolute, since who saves beside training may change the folder that it works in.
        patience: how long to wait for other workers; None: as long as the optimizer does.
    """

    path: Path
    notes: dict[str, Any]
    files: dict[str, Path]
    patience: timedelta | None

    @staticmethod
    def checked(
        path: Any, model: Any, optimizer: Any, notes: Any, files: Any, asynchronous: Any, group: Any, timeout: Any
    ) -> "Order":
        """The order, or a ValueError for the first argument that is no good."""
        whole = checked_path("path", path)
        encoded = os.fsencode(whole.name)
        if not whole.name.isprintable() or whole.name.startswith(".") or not 0 < len(encoded) <= LONGEST_NAME:
            raise CheckpointError(
                f"path={_shown(path)} does not end in a name for a new checkpoint: give one of 1 to {LONGEST_NAME} "
                "bytes, all printable, that does not begin with '.'"
            )
        patience = checked_workers(model, optimizer, group, timeout)
        if not isinstance(asynchronous, bool):
            raise CheckpointError(f"asynchronous={_shown(asynchronous)} must be True or False")
        return Order(whole.absolute(), _notes(notes), _files(files), patience)


def checked_path(name: str, path: Any) -> Path:
    """The path that was given as argument `name`, or a CheckpointError."""
    try:
        text = os.fspath(path)
        if isinstance(text, str) and text and b"\0" not in os.fsencode(text):
            return Path(text)
    except (TypeError, UnicodeEncodeError):
        pass
    raise CheckpointError(f"{name}={_shown(path)} is no path: give text that is not empty, or a pathlib.Path")


def checked_workers(model: Any, optimizer: Any, group: Any, timeout: Any) -> timedelta | None:
    """How long to wait for other workers, or a ValueError for the first argument that is no good."""
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"model={_shown(model)} is no torch.nn.Module: give the model that the optimizer trains")
    if not isinstance(optimizer, Distributed):
        raise CheckpointError(
            f"optimizer={_shown(optimizer)} is none of dlion's: give a dlion.Distributed, DistributedLion or "
            "Simulation; torch.save keeps the state of others"
        )
    if optimizer.membership.lost and group is None:
        raise CheckpointError(
            "the optimizer was unpickled and its process group could not travel with it: set optimizer.process_group"
        )
    if not isinstance(group, Crew):
        check_process_group(group)
    check_workers(optimizer, group)
    return checked_timeout(timeout)


def _notes(given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise CheckpointError(f"notes={_shown(given)} is no dictionary: give names with values in JSON")
    try:
        kept: dict[str, Any] = json.loads(json.dumps(dict(given or {})))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"notes= holds what JSON cannot say ({one_line(str(error), SHOWN)}): give text, numbers, lists and "
            "dictionaries of them"
        ) from None
    return kept


def _files(given: Any) -> dict[str, Path]:
    if given is not None and not isinstance(given, Mapping):
        raise CheckpointError(f"files={_shown(given)} is no dictionary: give paths by the names that the files get")
    for name in given or {}:
        if not is_plain(name) or name.startswith((".", "__")):
            raise CheckpointError(
                f"files= has the name {_shown(name)}: give a plain one, at most 255 printable characters, that does "
                f"not begin with '.' or '__' and is not {NAME}"
            )
    return {name: checked_path(f"files[{name!r}]", source) for name, source in (given or {}).items()}


def _shown(given: Any) -> str:
    """What was given, as Python writes it; of tensors and modules, which are long, the kind."""
    plain = given is None or isinstance(given, (str, bytes, os.PathLike, int, float, list, tuple, dict))
    return shown(given, SHOWN) if plain else f"a {type(given).__module__}.{type(given).__qualname__}"
