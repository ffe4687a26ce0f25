"""Guards the run folder: names that two commands never share, resuming to the bit, damage that is found."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import TINY, dlion, records
from safetensors import SafetensorError

from dlion.checkpoint.stacked import Stacked
from dlion.train import checkpoints, weights
from dlion.train.config import Settled, TrainConfig, from_flags, learning_rate, read_toml, settle, to_flags
from dlion.train.runs import RunFolder

CADENCE = ("--eval-every", "8", "--save-every", "7")


@pytest.fixture
def config() -> Settled:
    return settle(TrainConfig(seed=3), model="conv", workers=2, steps_per_epoch=10)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run, once in 20 steps and once in 10 and then on to 20."""
    folder = tmp_path_factory.mktemp("pair")
    train = ["train", *TINY, *CADENCE, "--out", ".", "--warmup-steps", "3"]
    dlion([*train, "--steps", "20", "--name", "whole"], folder)
    dlion([*train, "--steps", "10", "--name", "halves"], folder)
    assert [line["step"] for line in records(folder / "halves") if "val_loss" in line] == [0, 8, 10]
    output, _ = dlion(["train", "--resume", "halves", "--steps", "20"], folder)
    assert "resumed after step 10" in output
    return folder / "whole", folder / "halves"


def own_of(run: Path, step: int, rank: int) -> dict[str, torch.Tensor]:
    """What a worker had for itself at a checkpoint."""
    stacked = Stacked(run / f"checkpoints/step-{step:08d}")
    return stacked.rows([key for key in stacked.keys if key.startswith(("own/", "buffer/"))], rank)


@pytest.mark.processes
def test_resuming_equals_never_having_stopped(pair: tuple[Path, Path]) -> None:
    whole, halves = pair
    assert records(halves) == records(whole)
    for name in ("model.safetensors", "model-last.safetensors", "config.toml"):
        assert (halves / name).read_bytes() == (whole / name).read_bytes()
    for rank in range(2):
        first, second = (own_of(run, 20, rank) for run in pair)
        assert first.keys() == second.keys() and any(key.startswith("own/exp_avg/") for key in first)
        assert all(torch.equal(value, second[key]) for key, value in first.items())


@pytest.mark.processes
def test_overlap_trains_to_the_same_bits(pair: tuple[Path, Path], tmp_path: Path) -> None:
    dlion(["train", *TINY, *CADENCE, "--out", ".", "--warmup-steps", "3", "--steps", "20", "--overlap"], tmp_path)
    (run,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert "overlap = true" in (run / "config.toml").read_text()
    name = "model-last.safetensors"
    assert (run / name).read_bytes() == (pair[0] / name).read_bytes()


@pytest.mark.processes
def test_workers_keep_momenta_of_their_own(pair: tuple[Path, Path]) -> None:
    files = json.loads((pair[0] / "checkpoints/step-00000020/manifest.json").read_text())["files"]
    assert files["__0_0.distcp"]["sha256"] != files["__1_0.distcp"]["sha256"]
    first, second = (own_of(pair[0], 20, rank) for rank in range(2))
    assert not any(torch.equal(value, second[key]) for key, value in first.items() if key.startswith("own/exp_avg/"))


@pytest.mark.processes
def test_the_last_two_checkpoints_are_kept(pair: tuple[Path, Path]) -> None:
    assert sorted(path.name for path in (pair[0] / "checkpoints").iterdir()) == ["step-00000014", "step-00000020"]


@pytest.mark.processes
def test_a_finished_run_says_so(pair: tuple[Path, Path]) -> None:
    run = pair[0]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    output, errors = dlion(["train", "--resume", "whole"], run.parent)
    assert "is finished after 20 steps" in output and errors == ""
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def run_main(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    from dlion.cli import main

    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.processes
def test_a_resumed_run_cannot_become_another(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    said = run_main(["train", "--resume", str(pair[0]), "--lr", "0.5", "--steps", "30"], capsys)
    assert "holds a different run (--lr is 0.001 there and 0.5 here)" in said
    assert "--steps must be more" in run_main(["train", "--resume", str(pair[0]), "--steps", "5"], capsys)


@pytest.mark.processes
def test_a_taken_name_is_an_error(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    where = ["train", "--out", str(pair[0].parent), "--name", "whole"]
    assert "holds a different run" in run_main(where, capsys)
    same = ["--config", str(pair[0] / "config.toml")]
    assert "already holds this run" in run_main([*where, *same], capsys)


DAMAGE = {
    "summary.json": ["", "null", "{}", '{"threads": "x"}'],
    "config.toml": ["", "task = 5", 'steps = "a"', "betas = [1]", "x = 1"],
    "model.safetensors": ["", "garbage" * 100],
}


@pytest.mark.processes
@pytest.mark.parametrize(("name", "content"), [(name, each) for name, all_ in DAMAGE.items() for each in all_])
def test_eval_says_in_one_sentence_which_file_is_damaged(
    name: str, content: str, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    victim = pair[0] / name
    whole = victim.read_bytes()
    try:
        victim.write_text(content)
        assert str(victim) in run_main(["eval", str(pair[0])], capsys)
    finally:
        victim.write_bytes(whole)


@pytest.mark.processes
@pytest.mark.parametrize("line", [b"{}", b"null", b"garbage", b'{"step": "x"}', b"\xff"])
def test_damaged_metrics_are_found_before_a_worker_starts(
    line: bytes, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    victim = pair[1] / "metrics.jsonl"
    whole = victim.read_bytes()
    try:
        victim.write_bytes(line + b"\n" + whole)
        said = run_main(["train", "--resume", str(pair[1]), "--steps", "30"], capsys)
        assert f"line 1 of {victim} is damaged" in said
    finally:
        victim.write_bytes(whole)


@pytest.mark.processes
def test_two_commands_never_train_in_one_folder(
    pair: tuple[Path, Path], tmp_path: Path, config: Settled, capsys: pytest.CaptureFixture[str]
) -> None:
    first = RunFolder.existing(pair[0])
    first.hold()
    said = run_main(["train", "--resume", str(pair[0]), "--steps", "30"], capsys)
    assert f"another command is training in {pair[0]}" in said
    first.release()
    (tmp_path / "x").mkdir()
    second = RunFolder(tmp_path / "x")  # as a command that has not written its configuration yet
    second.hold()
    with pytest.raises(ValueError, match="another command is training"):
        RunFolder.create(tmp_path, "x", config)
    second.release()
    RunFolder.create(tmp_path, "x", config).release()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, config: Settled, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dlion.train.runs.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        RunFolder.create(tmp_path, "x", config)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What safetensors says of it itself would not be understood."""

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights, "save_model", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/model\.safetensors'"):
        weights.save_weights(torch.nn.Linear(1, 1), tmp_path / "model.safetensors")


def test_checkpoints_are_ordered_by_their_steps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = ["step-99999999", "step-100000000", "step-mine"]
    for name in names:
        (folder.checkpoints / name).mkdir(parents=True)
    assert checkpoints._steps(folder) == [99999999, 100000000]


def test_names_are_free_and_never_shared(tmp_path: Path, config: Settled) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: RunFolder.create(tmp_path, None, config).path.name, range(8)))
    stem = "fashion-mnist-dlion-mavo-n2-s3"
    assert sorted(folders) == sorted([stem, *(f"{stem}-{k}" for k in range(2, 9))])


def test_a_configuration_survives_its_file(tmp_path: Path, config: Settled) -> None:
    changed = replace(config, iid=False, clip_norm=0.5, schedule="cosine", lr=1 / 3)
    folder = RunFolder.create(tmp_path, "x", changed)
    assert folder.read_config() == changed
    assert from_flags(to_flags(changed)) == changed
    assert set(read_toml(folder.config_file)) == set(to_flags(changed))


def test_records_survive_a_crash_and_numbers_that_are_not(tmp_path: Path, config: Settled) -> None:
    folder = RunFolder.create(tmp_path, None, config)
    for step in range(4):
        folder.append({"step": step, "loss": float("nan") if step == 1 else 0.5})
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [record["loss"] for record in folder.records()] == [0.5, None, 0.5, 0.5]
    folder.forget_from(2)
    assert [record["step"] for record in folder.records()] == [0, 1]
    assert "NaN" not in folder.metrics_file.read_text()


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_learning_rates_warm_up_and_never_vanish(config: Settled, schedule: str) -> None:
    plan = replace(config, steps=20, warmup_steps=5, lr=1.0, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(plan, step) for step in range(1, 21)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == 1.0 and min(rates) > 0.0
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert (rates[-1] < 0.1) == (schedule != "constant")


def test_epochs_count_the_whole_set_for_each_worker() -> None:
    assert settle(TrainConfig(epochs=3), model="conv", workers=2, steps_per_epoch=10).steps == 30


@pytest.mark.processes
def test_no_temporary_file_stays(pair: tuple[Path, Path]) -> None:
    assert not [path for path in pair[0].parent.rglob("*") if re.search(r"\.tmp$", path.name)]


def test_a_rank_that_does_not_see_the_folder_is_named_before_the_first_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ValueError, match=r"rank 2 does not see .*/run, which rank 0 has made: give --out"):
        folder.check_seen_by(2)
    folder.path.mkdir()
    folder.config_file.touch()
    folder.check_seen_by(2)
