"""Ray Train with two real workers: local gradients, bytes, a lost worker, resuming, and what is reported."""

import io
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import launch
from raylet import processes_of, small_ray

from dlion.checkpoint import is_complete

SECONDS = 400  # Ray starts many processes, and there is other work on the machine
pytestmark = pytest.mark.timeout(SECONDS + 60)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/with_ray.py"
STEPS, SAVED = 6, 3


def drive(rank: int, size: int, folder: Path, place: str) -> str:
    """Run the example as it stands, with its training function watched; what it prints."""
    with small_ray(2, place), warnings.catch_warnings(), redirect_stdout(io.StringIO()) as printed:
        import ray.train.torch  # only here: a Ray must have its settings before
        from ray_workers import watched

        warnings.simplefilter("ignore")  # Ray's own
        trainer = ray.train.torch.TorchTrainer
        ray.train.torch.TorchTrainer = lambda train, **given: trainer(partial(watched, train, folder), **given)
        storage = ["--storage", str(folder / "storage")]
        sys.argv = [str(EXAMPLE), "--steps", str(STEPS), "--save-every", str(SAVED), *storage]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    """The folder of Ray's own; not pytest's, whose name is too long for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder
        for process in processes_of(folder):  # of a driver that was killed, because it took too long
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def printed(folder: Path, place: str) -> str:
    (found,) = launch(folder, 1, partial(drive, place=place), seconds=SECONDS)
    assert isinstance(found, str), found
    return found


@pytest.fixture
def found(printed: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    names = ("whole", "again", "averaging")
    return {name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)] for name in names}


def test_gradients_stay_local_and_parameters_equal(found: dict[str, list[dict[str, Any]]]) -> None:
    first, second = found["whole"]
    assert len(first["gradients"]) == STEPS
    assert all(a != b for a, b in zip(first["gradients"], second["gradients"], strict=True))
    assert first["momenta"] != second["momenta"] and first["parameters"] == second["parameters"]
    assert not [text for rank in (first, second) for text in rank["said"] if "dlion" in text]


def test_bytes_are_those_of_the_formula(found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found["whole"]:  # two workers send each other whole ballots: docs/methods.md
        assert rank["bytes"] == STEPS * (16 + 8 * rank["words"])


def test_after_a_lost_worker_the_run_goes_on_to_the_bit(found: dict[str, list[dict[str, Any]]]) -> None:
    for whole, again in zip(found["whole"], found["again"], strict=True):
        assert again["gradients"] == whole["gradients"][SAVED:]
        for what in ("parameters", "momenta", "bytes"):
            assert again[what] == whole[what]


def test_averaging_left_on_is_reported(found: dict[str, list[dict[str, Any]]]) -> None:
    first, second = found["averaging"]
    assert first["gradients"] == second["gradients"]
    for rank in (first, second):
        assert len([text for text in rank["said"] if "averaged already" in text and "local_gradients" in text]) == 1


def test_checkpoints_are_in_rays_storage(printed: str, folder: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    assert printed.startswith("step 6: loss") and "1.00 bits sent" in printed
    kept = [path for path in (folder / "storage/dlion").iterdir() if path.is_dir()]
    assert len(kept) == 2 and all(map(is_complete, kept)) and not list((folder / "storage/drafts").iterdir())


def test_no_process_is_left(printed: str, place: str) -> None:
    ends = time.monotonic() + 30  # who was told to end needs its time to
    while processes_of(place) and time.monotonic() < ends:
        time.sleep(0.2)
    assert not processes_of(place)
