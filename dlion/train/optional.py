"""Packages that only some tasks need, imported when they are used."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib import import_module
from typing import Any

from dlion.train.legal import said_by


def needed(module: str, package: str, purpose: str, command: str | None = None) -> Any:
    """The module, imported now.

    Args:
        command: gets the package, if not one of dlion's extras does.

    Raises:
        ValueError: `package` is not installed; the sentence says what needs it and how to get it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        extra = "few-shot" if package == "lm_eval" else "hf"
        how = command or f'pip install "dlion[{extra}]"'
        raise ValueError(f"{purpose} needs the package {package}: {how}") from None


def data_sets() -> Any:
    """The module `datasets`, quiet where nobody watches."""
    module = needed("datasets", "datasets", "a Hugging Face data set")
    if not sys.stderr.isatty():
        module.disable_progress_bars()
    return module


@contextmanager
def quiet() -> Iterator[None]:
    """Let progress bars, which packages write to standard error, be seen only where somebody watches them."""
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        yield


PANIC = "PanicException"  # what packages written in Rust raise when they meet a fault of their own: no Exception


@contextmanager
def reading(what: str, advice: str = "") -> Iterator[None]:
    """Turn whatever a package raises while it reads into one sentence: damaged files make them raise nearly anything.

    Raises:
        ValueError: `what` cannot be read; Refused is passed on as it stands.
    """
    try:
        yield
    except Refused as error:
        raise ValueError(str(error)) from None
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        reason = said_by(error)
        raise ValueError(f"{what} cannot be read ({reason}){': ' + advice if advice else ''}") from None


class Refused(ValueError):
    """A sentence of dlion's own, from within what a package calls."""


def harness() -> Any:
    """The package `lm_eval`, without its warnings, which are about what dlion sets on purpose."""
    module = needed("lm_eval", "lm_eval", "dlion few-shot")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return module


def transformers_for(purpose: str) -> Any:
    """The module `transformers`, quiet where nobody watches."""
    module = needed("transformers", "transformers", purpose)
    if not sys.stderr.isatty():
        module.utils.logging.disable_progress_bar()
    return module
