"""Resuming a run: the last whole checkpoint, on the same data, with any number of workers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import TINY, dlion, records
from safetensors.torch import load_file

from dlion.cli import app, main
from dlion.train import checkpoints
from dlion.train.config import TrainConfig
from dlion.train.failure import Failure
from dlion.train.jobs import task_of
from dlion.train.runs import RunFolder

EVERY = ("--eval-every", "4", "--save-every", "4", "--keep-checkpoints", "3")
LAST, BEFORE = "step-00000010", "step-00000008"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 steps of two workers."""
    folder = tmp_path_factory.mktemp("made")
    dlion(["train", *TINY, *EVERY, "--steps", "10", "--out", ".", "--name", "run"], folder)
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(made, tmp_path / "run")


def found_in(run: Path) -> checkpoints.Checkpoint:
    folder = RunFolder(run)
    config = folder.read_config()
    return checkpoints.latest(folder, config, task_of(config).info)


@pytest.mark.processes
def test_why_a_run_failed_is_kept_when_it_goes_on(run: Path) -> None:
    folder = RunFolder(run)
    Failure("rank 1", "it was ended by SIGKILL", "details\n").keep(folder.failure_log)
    checkpoints.rewind(folder, found_in(run))
    Failure("rank 0", "it ran out of memory", "").keep(folder.failure_log)
    said = folder.failure_log.read_text()
    assert said == "rank 1: it was ended by SIGKILL\n\ndetails\n\nrank 0: it ran out of memory\n\n\n\n"


def flip(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip(path / "__1_0.distcp"),
    "index": lambda path: flip(path / ".metadata"),
    "gone": lambda path: (path / "__0_0.distcp").unlink(),
    "best": lambda path: (path / "best.safetensors").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: (path / "manifest.json").write_text('{"format": 2, "files"'),
    "no progress": lambda path: change(path, lambda notes: notes.pop("progress")),
    "odd step": lambda path: change(path, lambda notes: notes["progress"].update(step="10")),
    "another step": lambda path: change(path, lambda notes: notes["progress"].update(step=8)),
    "odd best step": lambda path: change(path, lambda notes: notes["progress"].update(best_step=99)),
    "odd seconds": lambda path: change(path, lambda notes: notes["progress"].update(seconds=None)),
    "odd key": lambda path: change(path, lambda notes: notes["progress"].update(x=1)),
}


def change(path: Path, act: Callable[[dict[str, Any]], object]) -> None:
    """Edit the notes in a manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    act(manifest["notes"])
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.processes
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_remark(damage: str, run: Path) -> None:
    DAMAGE[damage](run / "checkpoints" / LAST)
    found = found_in(run)
    assert found.path.name == BEFORE and found.progress.step == 8
    (remark,) = found.remarks
    assert "step-00000010" in remark or "step 10" in remark
    for other in (BEFORE, "step-00000004"):
        DAMAGE["flipped"](run / "checkpoints" / other)
    with pytest.raises(ValueError, match=r"has no checkpoint that is whole .*start the run again without --resume"):
        found_in(run)


@pytest.mark.processes
def test_a_run_goes_on_from_the_checkpoint_before_and_ends_where_it_would_have(run: Path, made: Path) -> None:
    flip(run / "checkpoints" / LAST / "__0_0.distcp")
    (run / "checkpoints/.step-00000012.tmp").mkdir()  # of a run that was killed
    output, errors = dlion(["train", "--resume", "run"], run.parent)
    assert errors == ""
    remark = "checkpoints/step-00000010 is damaged (__0_0.distcp is not what its manifest says)"
    assert f"{remark}\nresumed after step 8\n" in output
    assert records(run) == records(made)
    for name in ("model.safetensors", "model-last.safetensors"):
        assert (run / name).read_bytes() == (made / name).read_bytes()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000004", BEFORE, LAST]
    assert found_in(run).remarks == ()


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.processes
def test_other_data_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (LAST, BEFORE):
        change(run / "checkpoints" / name, lambda notes: notes["data"].update(sha256="abc"))
    said = refused(["train", "--resume", str(run), "--steps", "12"], capsys)
    assert "was trained on other data" in said and "abc" in said and "--data" in said


@pytest.mark.processes
def test_checkpoints_of_another_run_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run / "checkpoints" / LAST, lambda notes: notes["run"].update(lr=0.5))
    assert "belong to a run with other flags" in refused(["train", "--resume", str(run), "--steps", "12"], capsys)


@pytest.mark.processes
def test_a_newer_format_is_said_and_not_taken_for_damage(run: Path) -> None:
    file = run / "checkpoints" / LAST / "manifest.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 3'))
    assert "has format 3 and this version of dlion reads format 2" in found_in(run).remarks[0]


@pytest.mark.processes
def test_another_number_of_workers_goes_on_and_batches_may_change_with_it(
    run: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["train", "--resume", str(run), "--steps", "14"]
    assert "--batch-size is 4 there and 8 here" in refused([*resume, "--batch-size", "8"], capsys)
    output, errors = dlion([*resume, "--workers", "1", "--batch-size", "8"], run.parent)
    assert errors == ""
    assert "resumed after step 10, with 1 worker where there were 2: all start from the mean" in output
    assert records(run)[:10] == records(made)[:10]
    said = json.loads((run / "summary.json").read_text())
    assert said["workers"] == 1 and said["steps"] == 14
    first, last = (load_file(each / "model-last.safetensors") for each in (made, run))
    moved = max(float((last[name] - value).abs().max()) for name, value in first.items())
    assert 0 < moved < 4.5e-3  # four steps of 1e-3 in size, decay is none
    again, _ = dlion(["train", "--resume", "run", "--simulate", "3", "--batch-size", "2", "--steps", "16"], run.parent)
    assert "with 3 workers where there was 1" in again and "3 simulated workers" in again
    config = (run / "config.toml").read_text()
    assert "simulate = 3" in config and "batch-size = 2" in config and "\nworkers" not in config


@pytest.mark.processes
def test_under_a_launcher_a_run_goes_on_with_the_workers_that_are_there(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> TrainConfig:
        _, bound, _ = app.parse_args(["train", "--resume", str(made)], exit_on_error=False, print_error=False)
        settings: TrainConfig = bound.arguments["settings"]
        return settings

    assert asked().workers == 2
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "3")
    assert asked().workers is None and asked().steps == 10


def test_the_last_checkpoints_stay_and_the_best_one() -> None:
    records = [
        {"step": 0, "val_loss": 9.0},
        {"step": 4, "val_loss": 1.0},
        {"step": 6, "loss": 0.1},
        {"step": 8, "val_loss": 2.0},
        {"step": 9, "val_loss": 0.5},
    ]
    steps = [4, 6, 8, 12, 16]
    assert checkpoints._outdated(steps, records, keep=1) == [6, 8, 12]
    assert checkpoints._outdated(steps, records, keep=2) == [6, 8]
    assert checkpoints._outdated(steps, records, keep=5) == checkpoints._outdated([], records, keep=1) == []
    assert checkpoints._outdated(steps, [], keep=2) == [4, 6, 8]
    accurate = [record | {"val_accuracy": record["step"] / 10} for record in records if "val_loss" in record]
    assert checkpoints._outdated(steps, accurate, keep=2) == [4, 6]


@pytest.mark.processes
def test_what_checkpoints_held_up_is_counted_and_said(made: Path) -> None:
    said = json.loads((made / "summary.json").read_text())
    assert said["checkpoints"] == 3 and 0 < said["checkpoint_seconds"] < said["seconds_total"]
    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    times = [line["checkpoint_seconds"] for line in lines]
    assert times[0] == 0 and times == sorted(times) and times[-1] == said["checkpoint_seconds"]


@pytest.mark.processes
def test_a_full_disk_ends_the_run_and_says_from_where_it_goes_on(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are forks of this process, and have its disk that is full."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dlion.checkpoint.manifest.Manifest.write", full)
    threads = torch.get_num_threads()
    try:
        assert main(["train", "--resume", str(run), "--steps", "20"]) == 1
    finally:
        torch.set_num_threads(threads)
    said = capfd.readouterr().err
    assert "checkpoints/step-00000012 was not written: rank 0: No space left on device" in said
    assert f"go on with: dlion train --resume {run}" in said
    assert found_in(run).path.name == LAST
