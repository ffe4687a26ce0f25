"""Every error that dlion raises on purpose. Each says what was given, what is allowed and what to do."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlion.quoting import visible

OF_RUST = re.compile(r"\(os error (\d{1,4})\)")


class DlionError(RuntimeError):
    """Base class of the errors that a running exchange can meet.

    They quote what others said (other workers, torch, the system): nothing of it reaches a terminal but what prints.
    """

    def __init__(self, *said: object) -> None:
        super().__init__(*(visible(each) if isinstance(each, str) else each for each in said))


class GroupNotReadyError(DlionError):
    """The optimizer was used with WORLD_SIZE > 1 before a process group existed."""


class AgreementError(DlionError):
    """The workers do not train the same thing: layout, hyper-parameters, options or parameters differ."""


class NonFiniteGradientError(DlionError):
    """A gradient was infinite or NaN and the optimizer was made with nonfinite="raise"."""


class ExchangeError(DlionError):
    """A worker was lost, or did not come, while ballots or verdicts were exchanged."""


class OverlapError(DlionError):
    """A gradient changed after this worker had voted with it, which overlap=True does during backward."""


class QuorumError(DlionError):
    """Too few workers are there to train on, or the lighthouse that counts them does not answer."""


class CheckpointError(DlionError, ValueError):
    """A checkpoint is not there, not complete, damaged or of something else; or it could not be written."""


def of_the_system(error: BaseException) -> OSError | None:
    """What the system said behind an error, None where it said nothing.

    Torch hides it behind an error of its own; libraries in Rust (safetensors) write its number into theirs.
    """
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        if number := OF_RUST.search(str(inner)):
            return OSError(int(number[1]), os.strerror(int(number[1])))
        inner = inner.__cause__ or inner.__context__
    return inner


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let what the system says name the file: of a full disk it does not."""
    try:
        yield
    except Exception as error:
        system = of_the_system(error)
        if system is not None and system.filename is None:
            system.filename = str(path)
        raise


def ranks_text(ranks: list[int]) -> str:
    """'rank 1' or 'ranks 1, 3'."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
