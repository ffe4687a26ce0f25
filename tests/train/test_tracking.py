"""Records go to trackers too. Their packages are stood in for here; `tests/integrations` has the real ones."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlion.cli import main
from dlion.train.config import TrainConfig, settle
from dlion.train.progress import Silent
from dlion.train.runs import RunFolder
from dlion.train.tracking import Tracked, numbers_of, tracked

RUN = ["--simulate", "2", "--steps", "4", "--log-every", "2", "--eval-every", "4", "--batch-size", "8", "--name", "r"]


class Wandb:
    """What `wandb` offers of what is used here."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.finished = 0

    def init(self, **given: Any) -> "Wandb":
        self.given.append(given)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
    return module


def test_every_record_goes_to_the_tracker(wandb: Wandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *RUN, "--track", "wandb"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines()]
    assert [values["step"] for values in wandb.logged] == [line["step"] for line in lines] == [0, 2, 4]
    assert wandb.logged[1]["loss"] == lines[1]["loss"] and wandb.logged[1]["lr"] == lines[1]["lr"]
    costs = {"bytes_sent", "bits_per_param_sent", "abstentions", "ballot_seconds", "tally_seconds", "apply_seconds"}
    assert costs <= wandb.logged[2].keys() and wandb.finished == 1
    assert wandb.logged[2]["ballot_seconds"] > 0
    (given,) = wandb.given
    assert given["project"] == "dlion" and given["config"]["batch-size"] == 8 and "track" not in given["config"]

    assert main(["train", "--resume", "runs/r", "--steps", "6"]) == 0  # the run's own configuration names the tracker
    assert wandb.given[1]["id"] == given["id"] and wandb.logged[-1]["step"] == 6


def test_two_runs_of_one_name_are_not_taken_for_one(wandb: Wandb, tmp_path: Path) -> None:
    config = a_config("wandb")
    for place in ("here", "there"):
        tracked(Silent(), RunFolder(tmp_path / place / "r"), config, at=0)
    assert wandb.given[0]["id"] != wandb.given[1]["id"] and wandb.given[0]["name"] == wandb.given[1]["name"]


def a_config(*names: str) -> Any:
    config = TrainConfig(steps=2, track=names)  # type: ignore[arg-type]
    return settle(config, model="conv", workers=1, steps_per_epoch=1, lr=0.1, betas=(0.9, 0.99))


def test_lists_and_what_is_no_number() -> None:
    record = {"step": 3, "loss": math.inf, "ratio": 2, "agreement": [0.5, None, 0.75], "note": "x", "lr": None}
    assert numbers_of(record) == {"ratio": 2.0, "agreement/0": 0.5, "agreement/2": 0.75}


class Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, *lines: str) -> None:
        self.lines += lines


def test_a_tracker_that_fails_is_left_out_and_training_goes_on() -> None:
    def broken(values: Any, step: int) -> None:
        raise ConnectionError("the service\x1b[31m is gone\n")

    screen, kept = Lines(), []
    good = SimpleNamespace(log=lambda values, step: kept.append(step), close=lambda: None)
    both = Tracked(screen, {"wandb": SimpleNamespace(log=broken, close=broken), "tensorboard": good})
    both.show({"step": 1, "loss": 1.0})
    both.show({"step": 2, "loss": 1.0})
    both.close()
    assert kept == [1, 2] and len(screen.lines) == 1
    assert screen.lines[0].startswith("wandb failed (the service") and "\x1b" not in screen.lines[0]


def test_a_package_that_is_missing_is_said_before_there_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", None)  # type: ignore[arg-type]
    assert main(["train", *RUN, "--track", "trackio"]) == 2
    assert "--track trackio needs the package trackio: pip install trackio" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_tracker_that_cannot_begin_is_named(wandb: Wandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**given: Any) -> None:
        raise RuntimeError("no key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"--track wandb: it cannot begin \(no key\)"):
        tracked(Silent(), RunFolder(tmp_path), a_config("wandb"), at=0)


def test_a_tracker_is_named_once() -> None:
    with pytest.raises(ValueError, match="each tracker once"):
        TrainConfig(track=("wandb", "wandb"))
