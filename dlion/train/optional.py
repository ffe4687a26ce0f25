"""Packages that only some tasks need, imported when they are used."""

from importlib import import_module
from typing import Any


def needed(module: str, package: str, purpose: str) -> Any:
    """The module, imported now.

    Raises:
        ValueError: `package` is not installed; the sentence says what needs it and how to get it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise ValueError(f'{purpose} needs {package}: pip install "dlion[hf]"') from None
