"""All that bench/fuzz.py feeds."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fuzz import Parser
from fuzz_checkpoints import checkpoints
from fuzz_data import data
from fuzz_files import files
from fuzz_packages import packages
from fuzz_wire import wire


@contextlib.contextmanager
def parsers() -> Iterator[list[Parser]]:
    """Every parser, with a folder for the files that it reads, which is removed afterwards."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="dlion-fuzz-", dir=memory) as folder:
        place = Path(folder)
        yield [*wire(), *files(place), *checkpoints(place), *data(place), *packages(place)]
