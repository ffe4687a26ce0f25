"""`dlion train --simulate` and `--workers`: the same files to the byte, but for what a clock measured."""

import json
import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import await_step, dlion, is_clocked, records, start
from safetensors.torch import load_file

from dlion import agreement_rates
from dlion.checkpoint.stacked import Stacked
from dlion.cli import main
from dlion.simulate import Simulation
from dlion.simulate.team import Team
from dlion.train import streams
from dlion.train.config import TrainConfig, from_flags, settle, to_flags
from dlion.train.simulated import Signals

FLAGS = ["train", "--log-every", "1", "--eval-every", "3", "--save-every", "4", "--device", "cpu", "--threads", "1"]
FLAGS += ["--accumulate", "2", "--clip-norm", "1", "--no-iid"]
UNEQUAL = ["--batch-sizes", "2", "5", "3"]
FEW = ["train", "--simulate", "2", "--steps", "1", "--batch-size", "2", "--eval-every", "9"]
MODELS = ("model.safetensors", "model-last.safetensors")


def summary(run: Path) -> dict[str, Any]:
    told = json.loads((run / "summary.json").read_text())
    return {key: value for key, value in told.items() if not is_clocked(key)}


@contextmanager
def quiet() -> Iterator[None]:
    """What the command sets for its own process is put back."""
    threads, shown = torch.get_num_threads(), warnings.showwarning
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        warnings.showwarning = shown


def here(arguments: list[str], status: int = 0) -> None:
    """The command in this process, where simulated workers need no other."""
    with quiet():
        assert main(arguments) == status


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`real`, `simulated`, and `halves`, simulated, stopped after 5 of 11 steps and resumed; `five`: before that."""
    folder = tmp_path_factory.mktemp("trio")
    flags = [*FLAGS, *UNEQUAL, "--out", str(folder)]
    _, errors = dlion([*flags, "--workers", "3", "--steps", "11", "--name", "real"], folder)
    assert errors == ""
    here([*flags, "--simulate", "3", "--steps", "11", "--name", "simulated"])
    here([*flags, "--simulate", "3", "--steps", "5", "--name", "halves"])
    shutil.copytree(folder / "halves", folder / "five")
    return folder


@pytest.mark.processes
def test_a_simulated_run_is_the_real_one_to_the_byte(trio: Path) -> None:
    real, simulated = trio / "real", trio / "simulated"
    for name in MODELS:
        assert (real / name).read_bytes() == (simulated / name).read_bytes()
    assert records(real) == records(simulated) and len(records(real)) == 12
    assert records(real)[8]["agreement"] == [] and len(records(real)[11]["agreement"]) == 3  # after step 10
    assert all(0.5 < rate < 1 for rate in records(real)[11]["agreement"])
    assert summary(real) | {"simulated": True} == summary(simulated)
    assert summary(real)["simulated"] is False
    assert sorted(path.name for path in real.iterdir()) == sorted(path.name for path in simulated.iterdir())


@pytest.mark.processes
def test_every_worker_has_in_its_checkpoint_what_a_real_one_has(trio: Path) -> None:
    real, simulated = (trio / run / "checkpoints/step-00000011" for run in ("real", "simulated"))
    assert sorted(path.name for path in real.iterdir()) == sorted(path.name for path in simulated.iterdir())
    for rank in range(3):
        parts = [Stacked(each) for each in (real, simulated)]
        mine, theirs = (part.rows([key for key in part.keys if key.startswith("own/")], rank) for part in parts)
        assert len(mine) > 0 and mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key]) for key, value in mine.items())
        counted = [part.said(rank)["stats"]["bytes_sent"] for part in parts]
        assert counted[0] == counted[1] > 0


@pytest.mark.processes
def test_a_simulated_run_goes_on_with_real_workers(trio: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(trio / "five", tmp_path / "run")
    said, _ = dlion(["train", "--resume", "run", "--workers", "3", "--steps", "11"], tmp_path)
    assert "resumed after step 5\n" in said and "3 workers on cpu" in said
    for name in MODELS:
        assert (trio / "simulated" / name).read_bytes() == (copied / name).read_bytes()
    assert "workers = 3\n" in (copied / "config.toml").read_text()


def test_a_worker_that_votes_against_the_others_is_warned_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agreement_rates, "EVERY", 5)
    flags = ["train", "--simulate", "5", "--batch-size", "16", "--log-every", "5", "--steps", "26"]
    for name, liars in (("honest", ()), ("hostile", (2,))):
        monkeypatch.setattr(Team, "schedule", lambda *_, liars=liars: lambda rank, step: act_of(rank, liars))
        here([*flags, "--out", str(tmp_path), "--name", name])
        said = capsys.readouterr().out
        assert said.count("warning: worker 2 votes for what is decided in") == len(liars)
        assert said.count("warning") == len(liars)
        assert (records(tmp_path / name)[-1]["agreement"][2] < 0.6) == bool(liars)


def act_of(rank: int, liars: tuple[int, ...]) -> str | None:
    return "inverted" if rank in liars else None


@pytest.mark.processes
def test_a_resumed_simulation_is_one_that_never_stopped(trio: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here(["train", "--resume", str(trio / "halves"), "--steps", "11"])
    said = capsys.readouterr().out
    assert "resumed after step 5" in said and "3 simulated workers on cpu, 1 thread each" in said
    for name in MODELS:
        assert (trio / "simulated" / name).read_bytes() == (trio / "halves" / name).read_bytes()
    whole, halves = ([line for line in records(trio / run) if line["step"] != 5] for run in ("simulated", "halves"))
    assert whole == halves  # step 5 was evaluated as the last one


@pytest.mark.processes
def test_the_configuration_says_what_stands_in_the_place_of_what(trio: Path) -> None:
    for run, flag in (("real", "workers"), ("simulated", "simulate")):
        text = (trio / run / "config.toml").read_text()
        assert f"{flag} = 3\n" in text and "batch-sizes" in text and "batch-size =" not in text
        assert ("workers" in text) == (run == "real")


@pytest.mark.processes
@pytest.mark.parametrize(("given", "file"), [("real", "model"), ("real/model-last.safetensors", "model-last")])
def test_a_model_to_start_from_is_a_run_or_a_file(given: str, file: str, trio: Path, tmp_path: Path) -> None:
    start = str(trio / given)
    here([*FEW, "--lr", "1e-9", "--out", str(tmp_path), "--name", "run", "--init-from", start])
    before = load_file(trio / "real" / f"{file}.safetensors")
    after = load_file(tmp_path / "run/model-last.safetensors")
    assert all(torch.allclose(after[key], before[key], atol=1e-7) for key in before)
    assert f'init-from = "{start}"' in (tmp_path / "run/config.toml").read_text()


@pytest.mark.processes
@pytest.mark.parametrize("given", ["nowhere", "real/config.toml"])
def test_a_damaged_start_is_found_before_there_is_a_folder(
    given: str, trio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here([*FEW, "--out", str(tmp_path), "--init-from", str(trio / given)], status=2)
    assert "is missing, damaged or holds another model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_signal_ends_a_simulation_after_a_checkpoint(tmp_path: Path) -> None:
    flags = ["--simulate", "2", "--batch-size", "2", "--log-every", "1", "--steps", "100000", "--eval-every", "100000"]
    process = start(["train", *flags, "--out", ".", "--name", "run"], tmp_path)
    await_step(process, 3)
    os.kill(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "")
    step = records(tmp_path / "run")[-1]["step"] + 1
    assert f"stopped after step {step}; go on with: dlion train --resume run" in output
    assert (tmp_path / f"run/checkpoints/step-{step:08d}/manifest.json").exists()


def test_a_simulation_that_fails_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the disk is full")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Simulation, "step", fail)
    here([*FEW, "--name", "run"], status=1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("dlion: the simulation failed: the disk is full (more in ")
    assert "Traceback" in (tmp_path / "runs/run/failure.log").read_text()


def test_a_second_signal_that_comes_later_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("dlion.train.simulated.time.monotonic", lambda: now[0])
    signals = Signals()
    assert not signals.reached(1)
    signals.receive(signal.SIGINT, None)
    signals.receive(signal.SIGINT, None)  # some tools send one Ctrl-C twice
    assert signals.reached(1) and signals.number == signal.SIGINT
    now[0] += 2
    with pytest.raises(KeyboardInterrupt):
        signals.receive(signal.SIGINT, None)


@pytest.mark.parametrize("given", [{"workers": 4}, {"simulate": 4}, {"simulate": 2, "batch_sizes": (3, 5)}])
def test_flags_that_stand_for_others_survive_their_file(given: dict[str, Any]) -> None:
    config = settle(TrainConfig(**given), model="conv", workers=given.get("simulate", 4), steps_per_epoch=10)
    assert from_flags(to_flags(config)) == config
    assert config.samples_per_step == (8 if "batch_sizes" in given else 4 * 32)


def test_permutations_of_many_workers_are_kept_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    draws = streams.draws
    monkeypatch.setattr(streams, "draws", lambda *key, count: drawn.append(key) or draws(*key, count=count))
    kept = streams.Permutations(numbers=2000, always=3)
    for _ in range(4):
        for rank in range(20):
            assert sorted(kept.of(100, 1, rank, 0)) == list(range(100))
    assert len(drawn) == 20 and kept.total == 2000
    for rank in range(5):
        kept.of(1000, 2, rank, 0)
    assert kept.total == 3000  # three, whatever their length
    assert not np.array_equal(kept.of(1000, 2, 3, 0), kept.of(1000, 2, 4, 0))
