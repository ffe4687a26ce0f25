"""Packages that only some tasks need, imported when they are used."""

import logging
import os
import sys
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
        if (error.name or "").partition(".")[0] != package:
            raise
        extra = "few-shot" if package == "lm_eval" else "hf"
        raise ValueError(f'{purpose} needs the package {package}: pip install "dlion[{extra}]"') from None


def data_sets() -> Any:
    """The module `datasets`, quiet where nobody watches."""
    module = needed("datasets", "datasets", "a Hugging Face data set")
    if not sys.stderr.isatty():
        module.disable_progress_bars()
    return module


def harness() -> Any:
    """The package `lm_eval`, quiet where nobody watches; its warnings are about what dlion sets on purpose."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    module = needed("lm_eval", "lm_eval", "dlion few-shot")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return module


def transformers_for(purpose: str) -> Any:
    """The module `transformers`, quiet where nobody watches."""
    module = needed("transformers", "transformers", purpose)
    if not sys.stderr.isatty():
        module.utils.logging.disable_progress_bar()
    return module
