"""What the process of an elastic worker is told."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """What a worker's process is told: everything it needs, as it may be started again.

    Attributes:
        flags: of the run. folder: of the run. device: "cpu" or "cuda".
        lighthouse: HOST:PORT. number: of the worker. local_workers: how many share this machine.
        again: whether it was started before.
        log: file for what the process says on standard error, and for its last words.
        trained: file that is there once it has taken a step. go_on: the command that goes on with the run.
    """

    flags: dict[str, Any]
    folder: str
    device: str
    lighthouse: str
    number: int
    local_workers: int
    min_workers: int | None
    patience: float
    log: str
    trained: str
    go_on: str
    again: bool = False
