"""Guards bench/robustness.py and its page: runs are gone on with, liars may rest, and tables say what records show."""

import json
from pathlib import Path

import pytest
import robustness
import robustness_page
from robustness import Cell

SMALL = {3: {"inverted": (1,), "random": (1, 2), "colluding": (1,)}}


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robustness, "LIARS", SMALL)
    monkeypatch.setattr(robustness_page, "LIARS", SMALL)


def test_runs_are_gone_on_with_and_other_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--out", str(tmp_path), "--steps", "2"]
    assert robustness.main([*arguments, "--most", "1"]) == 0
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"method": "dlion-m')  # as a kill leaves it
    assert robustness.main([*arguments, "--most", "2"]) == 0
    found = list(robustness.found(tmp_path))
    assert found == list(robustness.plan())[:3] and [one.attack for one in found] == ["honest", "inverted", "random"]
    records = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert all(record["step"] == [0, 1, 2] and len(record["val_loss"]) == 3 for record in records)
    assert records[0]["val_loss"][0] == records[1]["val_loss"][0] and records[0]["val_loss"] != records[1]["val_loss"]
    assert robustness.main(["--out", str(tmp_path), "--steps", "3"]) == 2
    assert "holds runs with other settings" in capsys.readouterr().err


@pytest.mark.parametrize("attack", ["random", "colluding"])
def test_what_liars_compute_makes_no_difference_where_it_is_left_out(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = robustness.settings(2)
    task = robustness.load_task("text", None, robustness.Reading(context=64, eval_windows=4))
    cell = Cell("dlion-avg", 3, attack, 1, 42)
    losses = [robustness.run(cell, robustness.config_of(cell, common), task)["val_loss"]]
    for name in ("RANDOM", "COLLUDING"):
        monkeypatch.setattr(robustness, name, "nobody rests")
    losses.append(robustness.run(cell, robustness.config_of(cell, common), task)["val_loss"])
    assert losses[0] == losses[1]


def record(*losses: float) -> dict[str, list[float]]:
    return {"step": [0, 10, 20], "val_loss": list(losses)}


def test_the_tables_say_what_the_records_show() -> None:
    def cell(method: str, attack: str, liars: int, seed: int = 42) -> Cell:
        return Cell(method, 3, attack, liars, seed)

    records = {
        cell("dlion-mavo", "honest", 0): record(5.0, 3.0, 2.0),
        cell("dlion-mavo", "inverted", 1): record(5.0, 4.0, 2.5),
        cell("dlion-mavo", "random", 1): record(5.0, 2.9, 2.8),
        cell("dlion-mavo", "random", 2): record(5.0, 4.0, 3.5),
        cell("dlion-mavo", "colluding", 1): record(5.0, 4.0, 3.1),
        cell("dlion-avg", "honest", 0): record(5.0, 2.5, 2.0),
        cell("dlion-avg", "inverted", 1): record(5.0, 3.5, 2.7),
    }
    limits = robustness_page.limits(records).splitlines()[2:]
    assert limits == [
        "| 3 | inverted | **1**, the most tried | **0**, not 1 | **1**, the most tried |",
        "| 3 | random | **1**, not 2 | 0; not run from 1 on | 0; not run from 1 on |",
        "| 3 | colluding | **0**, not 1 | 0; not run from 1 on | 0; not run from 1 on |",
    ]
    rows = robustness_page.losses(records, 3)
    assert "| inverted | 1 | 2.500 | 20 | 2.700 | never |" in rows and "(target 3.000)" in rows
    assert "<svg" in robustness_page.drawing(records, 3)
