"""All that bench/fuzz.py feeds."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from fuzz import Parser
from fuzz_checkpoints import checkpoints
from fuzz_data import data
from fuzz_files import files
from fuzz_packages import packages
from fuzz_wire import wire

from dlion.train.data import instructions
from dlion.train.data.encoders import Bytes


@contextlib.contextmanager
def parsers() -> Iterator[list[Parser]]:
    """Every parser, with a folder for the files that it reads, which is removed afterwards.

    Nothing is looked for in a network or kept outside that folder, and instructions are read without a tokenizer.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="dlion-fuzz-", dir=memory) as folder:
        place = Path(folder)
        homes = {"XDG_CACHE_HOME": str(place / "cache"), "HF_HOME": str(place / "hub")}
        alone = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DLION_DATA": ""}
        with patch.dict(os.environ, homes | alone), patch.object(instructions, "encoder", lambda place: Bytes()):
            yield [*wire(), *files(place), *checkpoints(place), *data(place), *packages(place)]
