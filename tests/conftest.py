"""Settings of all tests: one thread for each rank, so that worlds of threads do not fight over the cores; and nothing
of Hugging Face's packages in the user's folders or from a network, here and in the commands that tests start. And core
tests are held to what `make test` has time for.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import nullcontext

import core
import pytest
import torch

torch.set_num_threads(1)
_hub = tempfile.mkdtemp(prefix="dlion-hub-")
atexit.register(shutil.rmtree, _hub, ignore_errors=True)
os.environ |= {"HF_HOME": _hub, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    core.thin_out(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    with core.bounds() if core.is_core(item) else nullcontext():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with core.bounds() if core.is_core(item) else nullcontext():
        yield
