"""Guards `dlion compare` as a command: it can be stopped and killed at any time, repeats nothing, and mixes nothing."""

import errno
import json
import signal
import subprocess
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command import dlion, start
from compare_study import STUDY, TOLD, recorded

from dlion.cli import main
from dlion.train.compare.cells import first_stage
from dlion.train.compare.command import run
from dlion.train.compare.folder import StudyFolder
from dlion.train.compare.settings import CompareConfig
from dlion.train.compare.study import study_from

TINY = """
simulate = true
[train]
task = "fashion-mnist"
workers = 1
batch-size = 4
eval-every = 100
save-every = 20
log-every = 1
[vary]
method = ["dlion-mavo"]
seed = [1]
[[vary.length]]
label = "short"
steps = 2
[[vary.length]]
label = "long"
steps = 300
"""


def lines(folder: Path) -> list[bytes]:
    return (folder / "cells.jsonl").read_bytes().splitlines()


def until(process: "subprocess.Popen[str]", ready: Callable[[], bool]) -> None:
    """Wait for something that the command does; it must not end before."""
    while not ready():
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            raise AssertionError(f"ended before: {process.communicate()}")


@pytest.mark.processes
def test_an_interrupted_study_goes_on_without_repeating_anything(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(TINY)
    command = ["compare", "--config", "study.toml", "--out", "out"]
    folder = StudyFolder(tmp_path / "out")

    def step_of_the_long_one(at_least: int) -> bool:
        return any(len(file.read_bytes().splitlines()) > at_least for file in folder.runs.glob("*/metrics.jsonl"))

    process = start(command, tmp_path)
    until(process, lambda: folder.cells_file.exists() and step_of_the_long_one(30))
    first = lines(folder.path)
    process.send_signal(signal.SIGTERM)  # the run under way writes a checkpoint and ends
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and "the same command goes on" in errors
    assert lines(folder.path) == first and len(first) == 1

    process = start(command, tmp_path)
    (log,) = (path for path in folder.logs.iterdir() if "long" in path.name)
    until(process, lambda: b"resumed after step" in log.read_bytes() and step_of_the_long_one(60))
    process.kill()  # the run under way knows nothing of that and goes on
    process.communicate()

    output, _ = dlion(["compare", "--out", "out"], tmp_path)  # as the folder says
    assert "[2/2] dlion-mavo length=long seed=1: best accuracy " in output
    assert lines(folder.path)[:1] == first and len(lines(folder.path)) == 2
    assert log.read_bytes().count(b"dlion train ") <= 3  # started, resumed, and perhaps again
    assert not list(folder.runs.iterdir())

    flags = "--simulate 1 --batch-size 4 --eval-every 100 --steps 300 --seed 1 --name whole"
    dlion(["train", *flags.split()], tmp_path)
    whole = json.loads((tmp_path / "runs/whole/summary.json").read_text())
    record = json.loads(lines(folder.path)[1])
    for key in ("val_loss", "best_val_accuracy", "bytes_sent", "steps", "data", "versions"):
        assert record[key] == whole[key]
    assert record["curve"]["step"] == [0, 100, 200, 300] and record["curve"]["val_loss"][-1] == whole["val_loss"]


@pytest.mark.processes
def test_a_cell_that_diverged_is_a_result_and_one_that_crashed_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "study.toml", tmp_path / "out"
    config.write_text(TINY.replace("seed = [1]", "seed = [1]\n[grid]\nlr = [1e30]"))
    cells = {cell.place["length"]: cell for cell in first_stage(study_from(toml(config)))}
    (out / "runs").mkdir(parents=True)
    (out / "runs" / cells["long"].name).write_text("in the way")
    assert main(["compare", "--config", str(config), "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "dlion: cell" not in said.err and "dlion-mavo length=long lr=1e+30 seed=1: dlion train ended" in said.err
    assert "Traceback" not in said.err + said.out
    (record,) = map(json.loads, lines(out))
    assert record["diverged"] and record["flags"]["steps"] == 2 and record["val_loss"] is None
    assert "1 of 1 diverged" in (out / "table.md").read_text() and "1 of 1 not run" in (out / "table.md").read_text()


def toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def filled(folder: Path, **changes: Any) -> StudyFolder:
    """A folder with the made-up study and one of its cells."""
    held = StudyFolder(folder)
    folder.mkdir(exist_ok=True)
    held.claim(STUDY)
    cell = first_stage(STUDY)[0]
    held.append(recorded(cell, 0.5, **changes))
    return held


def test_other_versions_are_refused_before_a_cell_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "study.toml"
    config.write_text(TINY)
    held = StudyFolder(tmp_path / "out")
    held.path.mkdir()
    held.claim(study_from({**toml(config), "metric": "val_accuracy"}))
    cell = first_stage(study_from(toml(config)))[0]
    held.append(recorded(cell, 0.5, versions={"dlion": "0.1.0", "python": "3.11.7", "torch": "1.0"}))
    before = lines(held.path)
    assert main(["compare", "--config", str(config), "--out", str(held.path)]) == 2
    said = capsys.readouterr().err
    assert "holds cells made with torch 1.0 and this is torch" in said or "made with python" in said
    assert lines(held.path) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": {"torch": "1.0"}}, "a cell has versions"),
        ({"threads": 2}, "a cell has threads 2"),
        ({"simulated": True}, "a cell has simulated True"),
        ({"data": {"name": "CIFAR-10", "sha256": "cd" * 32}}, "a cell has data"),
        ({"config": {"log-every": 5}}, "a cell has log-every 5"),
    ],
)
def test_cells_that_cannot_be_compared_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    held = filled(tmp_path)
    held.append(recorded(first_stage(STUDY)[1], 0.5, **changes))
    with pytest.raises(ValueError, match=message):
        held.records()


def test_what_a_method_settles_may_differ(tmp_path: Path) -> None:
    held = filled(tmp_path)
    held.append(recorded(first_stage(STUDY)[1], 0.5, config={"log-every": 10, "betas": [0.5, 0.5]}))
    assert len(held.records()) == 2


def test_another_study_is_refused(tmp_path: Path) -> None:
    held = filled(tmp_path)
    with pytest.raises(ValueError, match=r"other settings .steps is 40 there and 50 here.: .*another --out"):
        held.claim(study_from({**TOLD, "train": {"task": "cifar10", "steps": 50}}))
    other = study_from({**TOLD, "train": {"task": "cifar10", "steps": 50}})
    with pytest.raises(ValueError, match="other settings"):  # or the table would say that nothing was run
        run(CompareConfig(), other, held.path, table_only=True)
    assert not (held.path / "table.md").exists()
    held.study_file.unlink()
    with pytest.raises(ValueError, match="cells of no known study"):
        held.claim(STUDY)


def test_a_line_cut_short_is_run_again_and_a_damaged_one_told(tmp_path: Path) -> None:
    held = filled(tmp_path)
    whole = held.cells_file.read_bytes()
    held.cells_file.write_bytes(whole + whole[:50])
    assert len(held.records()) == 1
    held.append(recorded(first_stage(STUDY)[1], 0.5))
    assert held.cells_file.read_bytes().startswith(whole) and len(held.records()) == 2
    record = json.loads(whole)
    for broken in (
        {},
        None,
        record | {"diverged": "no"},
        record | {"versions": 3},
        record | {"curve": {"step": ["x"]}},
    ):
        held.cells_file.write_bytes(json.dumps(broken).encode() + b"\n" + whole)
        with pytest.raises(ValueError, match=r"line 1 of .*cells\.jsonl is damaged"):
            held.records()
    for missing in ("data", "diverged", "val_loss", "curve", "epoch_steps", "seconds", "config"):
        broken = {name: value for name, value in record.items() if name != missing}
        held.cells_file.write_bytes(json.dumps(broken).encode() + b"\n" + whole)
        with pytest.raises(ValueError, match=r"line 1 of .*cells\.jsonl is damaged"):
            held.records()


def test_a_full_disk_is_told_with_the_file_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = filled(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    before = sorted(held.path.iterdir())
    assert main(["compare", "--table", "--out", str(held.path)]) == 2
    assert f"No space left on device: {held.path}" in capsys.readouterr().err
    assert sorted(held.path.iterdir()) == before
    with pytest.raises(OSError, match=r"cells\.jsonl"):
        held.append(recorded(first_stage(STUDY)[1], 0.5))


def test_two_commands_do_not_share_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "study.toml", tmp_path / "out"
    config.write_text(TINY)
    with StudyFolder(out).held():
        assert main(["compare", "--config", str(config), "--out", str(out)]) == 2
    assert "another command works on" in capsys.readouterr().err
    assert list(out.iterdir()) == []


def test_a_time_limit_ends_it_before_a_cell_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "study.toml", tmp_path / "out"
    config.write_text(TINY)
    assert main(["compare", "--config", str(config), "--out", str(out), "--limit-minutes", "1e-9"]) == 0
    assert "The time is up with 2 cells" in capsys.readouterr().out
    assert (out / "study.toml").exists() and not (out / "cells.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "none.toml"], "none.toml cannot be read"),
        (["--methods", "no-such"], "unknown method 'no-such'"),
        (["--task", "no-such"], "unknown task 'no-such'"),
        (["--lrs", "0"], "--lr must be a finite number above 0"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--config", "study.toml", "--methods", "g-lion"], "--config and --methods contradict each other"),
        (["--table"], "holds no study"),
        (["--", "--name", "here"], "--name cannot be given to runs of a comparison"),
        (["--", "--dry-run"], "--dry-run cannot be given to runs of a comparison"),
        (["--task", "text", "--metric", "val_accuracy"], "task text has no accuracy: choose val_loss or best_val_loss"),
        (["--", "--simulate", "4"], "simulate is no flag of single runs"),
        (["--", "--seed", "3"], "seed is the same for all in [train] and varies elsewhere"),
    ],
)
def test_mistakes_are_told_in_one_sentence_and_leave_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(TINY)
    assert main(["compare", "--out", "out", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()
