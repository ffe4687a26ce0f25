"""Guards the script behind the README's quality table: its arithmetic, and stopping and resuming."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import quality
from quality_cells import (
    Cell,
    QualityError,
    Settings,
    claim_folder,
    read_cells,
    read_settings,
    run_cells,
)
from quality_table import (
    ACCURACY,
    LOSS,
    best_groups,
    command_of,
    difference_lines,
    fill_readme,
    groups_of,
    markdown,
    metric_of,
)

Record = dict[str, Any]
SETTINGS = Settings("text", 300, 4)


class FakeTraining:
    """Answers as `quality.train` does, with losses from a table, and remembers what it was asked to run."""

    def __init__(self, losses: dict[str, float] | None = None, **shared: Any) -> None:
        self.losses = losses or {}
        self.shared = {
            "data_sha256": "ab" * 32,
            "versions": {"torch": "2.13.0"},
            "config": {"steps": 300},
        } | shared
        self.ran: list[str] = []
        self.now = 0.0

    def __call__(self, settings: Settings, cell: Cell, folder: Path, seconds: float | None) -> Record:
        if seconds is not None and seconds < 60:
            raise TimeoutError(cell.name)
        self.ran.append(cell.name)
        self.now += 60
        loss = self.losses.get(cell.name, 1.0)
        return {
            "val_loss": loss,
            "val_accuracy": None,
            "bits_per_param_sent": 1.5,
            "ratio": 32.0,
            "seconds": 60.0,
            **self.shared,
        }

    def run(self, cells: list[Cell], folder: Path, settings: Settings = SETTINGS, limit: float = math.inf) -> bool:
        return run_cells(
            settings, cells, folder, self, limit_seconds=limit, say=lambda line: None, clock=lambda: self.now
        )


CELLS = [Cell(method, lr, seed) for seed in (1, 2) for lr in (1e-3, 2e-3) for method in ("dlion-mavo", "g-lion")]


def record(method: str, lr: float, seed: int, loss: float | None, accuracy: float | None = None) -> Record:
    return {
        "method": method,
        "lr": lr,
        "seed": seed,
        "val_loss": loss,
        "val_accuracy": accuracy,
        "bits_per_param_sent": 1.5,
        "ratio": 32.0,
        "seconds": 60.0,
        "data_sha256": "ab" * 32,
        "versions": {"torch": "2.13.0"},
    }


def test_finished_cells_are_not_run_again(tmp_path: Path) -> None:
    assert FakeTraining().run(CELLS[:3], tmp_path)
    second = FakeTraining()
    assert second.run(CELLS, tmp_path)
    assert second.ran == [cell.name for cell in CELLS[3:]]
    assert [line["lr"] for line in read_cells(tmp_path)] == [cell.lr for cell in CELLS]
    assert read_cells(tmp_path)[0]["steps"] == 300 and read_cells(tmp_path)[0]["workers"] == 4


def test_a_partial_last_line_is_dropped_and_its_cell_is_run_again(tmp_path: Path) -> None:
    FakeTraining().run(CELLS[:2], tmp_path)
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again = FakeTraining()
    again.run(CELLS[:2], tmp_path)
    assert again.ran == [CELLS[1].name]
    assert len(read_cells(tmp_path)) == 2
    # A whole object without its line end may be a cut number: 1.5 of 1.57.
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert len(read_cells(tmp_path)) == 1
    assert path.read_bytes().endswith(b"}\n")


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    FakeTraining().run(CELLS[:2], tmp_path)
    path = tmp_path / "cells.jsonl"
    path.write_text("{" + path.read_text())
    with pytest.raises(QualityError, match="line 1 is damaged"):
        read_cells(tmp_path)


@pytest.mark.parametrize(
    "other",
    [Settings("text", 200, 4), Settings("text", 300, 2), Settings("text", 300, 4, ("--clip-norm", "1"))],
)
def test_settings_are_not_mixed(tmp_path: Path, other: Settings) -> None:
    claim_folder(tmp_path, SETTINGS)
    claim_folder(tmp_path, SETTINGS)
    with pytest.raises(QualityError, match="take the same settings or another --out"):
        FakeTraining().run(CELLS, tmp_path, other)


@pytest.mark.parametrize(
    "shared", [{"data_sha256": "cd" * 32}, {"versions": {"torch": "2.14.1"}}, {"config": {"steps": 301}}]
)
def test_runs_that_cannot_be_compared_are_not_mixed(tmp_path: Path, shared: Record) -> None:
    FakeTraining().run(CELLS[:1], tmp_path)
    with pytest.raises(QualityError, match="cannot be compared"):
        FakeTraining(**shared).run(CELLS, tmp_path)
    assert len(read_cells(tmp_path)) == 1


def test_the_time_limit_holds_and_the_same_command_goes_on(tmp_path: Path) -> None:
    first = FakeTraining()
    assert not first.run(CELLS, tmp_path, limit=150)
    assert first.now <= 150 and len(first.ran) == 2
    assert FakeTraining().run(CELLS, tmp_path)
    assert not FakeTraining().run([Cell("g-adamw", 1e-3, 1)], tmp_path, limit=30)


def test_settings_come_back_as_they_were(tmp_path: Path) -> None:
    settings = Settings("text", 300, 4, ("--clip-norm", "1"))
    claim_folder(tmp_path, settings)
    assert read_settings(tmp_path) == settings
    with pytest.raises(QualityError, match="holds no runs"):
        read_settings(tmp_path / "elsewhere")
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(QualityError, match="damaged"):
        read_settings(tmp_path)


def test_the_best_learning_rate_is_by_the_mean_over_seeds() -> None:
    losses = {1e-3: (1.0, 1.4), 2e-3: (1.1, 1.2)}
    records = [record("g-lion", lr, s, loss) for lr, pair in losses.items() for s, loss in enumerate(pair)]
    best = best_groups(groups_of(records, LOSS), LOSS)["g-lion"]
    assert best.lr == 2e-3 and best.mean == pytest.approx(1.15)
    # Sample deviation of 1.1 and 1.2 by hand: |1.2 - 1.1| / sqrt(2).
    assert best.deviation == pytest.approx(0.1 / math.sqrt(2))


def test_accuracy_is_better_when_higher_and_printed_in_percent() -> None:
    records = [record("g-lion", 1e-3, 1, 0.1, 0.80), record("g-lion", 2e-3, 1, 0.2, 0.85)]
    metric = metric_of(records)
    assert metric is ACCURACY
    best = best_groups(groups_of(records, metric), metric)["g-lion"]
    assert best.lr == 2e-3 and best.mean == pytest.approx(85.0)
    assert math.isnan(best.deviation)


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_a_diverged_or_incomplete_learning_rate_is_never_best(lost: float | None) -> None:
    records = [record("g-lion", 1e-3, seed, 2.0) for seed in (1, 2)]
    records += [record("g-lion", 2e-3, 1, 1.0), record("g-lion", 2e-3, 2, lost)]
    records += [record("g-lion", 3e-3, 1, 0.5)]
    assert best_groups(groups_of(records, LOSS), LOSS)["g-lion"].lr == 1e-3
    text = markdown(SETTINGS, records)
    assert "| g-lion | 0.002 | 1.0000 | diverged | diverged |" in text
    assert "| g-lion | 0.003 | 0.5000 | not run | 0.5000 |" in text


@pytest.mark.parametrize(
    ("others", "verdict"),
    [
        # Deviations sqrt(2)/10 each, so the spread is 0.2.
        ((1.1, 1.3), "dlion-mavo minus g-lion: -0.1000, within the spread, 0.2000."),
        ((1.3, 1.5), "dlion-mavo minus g-lion: -0.3000, more than the spread, 0.2000."),
        ((0.7, 0.9), "dlion-mavo minus g-lion: +0.3000, more than the spread, 0.2000."),
    ],
)
def test_the_difference_is_held_against_the_spread(others: tuple[float, float], verdict: str) -> None:
    records = [record("dlion-mavo", 1e-3, seed, loss) for seed, loss in enumerate((1.0, 1.2))]
    records += [record("g-lion", 1e-3, seed, loss) for seed, loss in enumerate(others)]
    assert difference_lines(groups_of(records, LOSS), LOSS) == [verdict]


def test_one_seed_gives_no_verdict() -> None:
    records = [record("dlion-mavo", 1e-3, 1, 1.0), record("g-lion", 1e-3, 1, 1.5)]
    assert "its spread is not known" in difference_lines(groups_of(records, LOSS), LOSS)[0]


def test_the_table_shows_best_edge_and_command() -> None:
    rates = (3e-4, 1e-3, 2e-3)
    losses = {"dlion-mavo": (1.5, 1.0, 1.2), "g-lion": (1.5, 1.2, 1.0)}
    records = [
        record(method, lr, seed, loss + seed / 100)
        for method, row in losses.items()
        for lr, loss in zip(rates, row, strict=True)
        for seed in (1, 2, 3)
    ]
    text = markdown(SETTINGS, records)
    assert "| dlion-mavo | 0.001 | 1.0200 ± 0.0100 | 1.500 | 32.0 |" in text
    assert "| g-lion | 0.002 (edge of the grid) | 1.0200 ± 0.0100 | 1.500 | 32.0 |" in text
    command = command_of(SETTINGS, groups_of(records, LOSS))
    assert command in text
    assert command == (
        "python bench/quality.py --task text --steps 300 --workers 4 --methods dlion-mavo g-lion "
        "--lrs 0.0003 0.001 0.002 --seeds 1 2 3"
    )


def test_only_what_is_between_the_marks_is_rewritten(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- quality:begin text -->\nold\n<!-- quality:end text -->\nafter\n")
    fill_readme(readme, "text", "new")
    fill_readme(readme, "text", "newer")
    assert readme.read_text() == ("before\n<!-- quality:begin text -->\nnewer\n<!-- quality:end text -->\nafter\n")
    with pytest.raises(QualityError, match="once each"):
        fill_readme(readme, "fashion-mnist", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_no_cell_means_no_table(tmp_path: Path) -> None:
    claim_folder(tmp_path, SETTINGS)
    assert read_cells(tmp_path) == []
    with pytest.raises(QualityError, match="no cell has finished"):
        markdown(SETTINGS, read_cells(tmp_path))


@pytest.mark.parametrize("task", ["fashion-mnist", "text"])
def test_a_real_cell_is_trained_and_its_run_folder_removed(tmp_path: Path, task: str) -> None:
    settings = Settings(task, 2, 1, ("--batch-size", "8"))
    assert run_cells(settings, [Cell("dlion-mavo", 1e-3, 1)], tmp_path, quality.train, say=lambda line: None)
    (cell,) = read_cells(tmp_path)
    assert cell["val_loss"] > 0 and (cell["val_accuracy"] is None) == (task == "text")
    assert cell["config"]["batch-size"] == 8 and len(cell["data_sha256"]) == 64
    assert "torch" in cell["versions"] and "lr" not in cell["config"]
    assert not any((tmp_path / "runs").iterdir())


def test_a_run_that_fails_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(QualityError, match=r"dlion-mavo-lr-1-s1: dlion train ended with status 2, see .*--lr"):
        run_cells(SETTINGS, [Cell("dlion-mavo", -1.0, 1)], tmp_path, quality.train, say=lambda line: None)
    assert read_cells(tmp_path) == []


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    said: list[str] = []
    cells = [Cell("dlion-mavo", 1e-3, 1)]
    assert not run_cells(SETTINGS, cells, tmp_path, quality.train, limit_seconds=0.2, say=said.append)
    assert said == ["Time is up in dlion-mavo-lr0.001-s1, 1 cells to go: the same command goes on."]


def test_cells_are_one_json_object_a_line(tmp_path: Path) -> None:
    FakeTraining({CELLS[0].name: math.nan}).run(CELLS[:2], tmp_path)
    lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    assert [set(json.loads(line)) >= {"method", "lr", "seed", "config"} for line in lines] == [True, True]
    assert math.isnan(read_cells(tmp_path)[0]["val_loss"])
