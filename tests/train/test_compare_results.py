"""Guards the arithmetic of a study: which setting is chosen, means and spreads, and what the tables say."""

import csv
import io
import json
import math

import pytest
from compare_study import STUDY, TOLD, quality, recorded, run_all, told

from dlion.train.compare.cells import Cell, first_stage
from dlion.train.compare.choose import choose, rule, to_json
from dlion.train.compare.remarks import DIVERGED, EDGE, SPREAD, remarks
from dlion.train.compare.report import json_of
from dlion.train.compare.results import Results
from dlion.train.compare.study import study_from
from dlion.train.compare.table import best_rows, csv_of, markdown, show

RECORDS = run_all(STUDY)
RESULTS = Results(STUDY, RECORDS)


def test_the_best_setting_is_chosen_and_its_edges_are_told() -> None:
    found = {choice.variant: choice for choice in choose(STUDY, RECORDS).values()}
    assert {name: choice.point["lr"].label for name, choice in found.items()} == {
        "dlion-mavo": 0.001,
        "g-lion": 0.001,
        "terngrad": 0.1,
    }
    assert found["g-lion"].edges == ("lr",) and found["terngrad"].edges == ()
    assert found["g-lion"].at == "workers 4" and found["g-lion"].value == pytest.approx(0.5965)


def test_one_that_diverged_is_never_chosen() -> None:
    for metric in ("best_val_accuracy", "val_loss"):
        study = study_from(told(metric=metric))
        cells = first_stage(study)
        records = {cell.key: recorded(cell, None if cell.flags["lr"] == 0.001 else 0.5) for cell in cells}
        assert {choice.point["lr"].label for choice in choose(study, records).values()} == {0.01, 0.1}
    records = {cell.key: recorded(cell, None) for cell in cells}
    assert {choice.variant for choice in choose(study, records).values()} == {"terngrad"}  # which has no other


def test_the_lowest_loss_is_the_best() -> None:
    study = study_from(told(metric="val_loss"))
    found = choose(study, run_all(study))  # losses fall where accuracies rise
    assert found["g-lion", "workers 4"].point["lr"].label == 0.001
    assert found["g-lion", "workers 4"].value == pytest.approx(1 - 0.5965 / 2)


def test_the_grid_tells_what_diverged() -> None:
    records = {cell.key: recorded(cell, None if cell.flags["lr"] == 0.01 else 0.5) for cell in first_stage(STUDY)}
    assert "| 4 | g-lion | 0.01 | 0.1 |  | diverged | 1 of 1 diverged |" in markdown(Results(STUDY, records))


def test_nothing_is_chosen_as_long_as_a_cell_is_missing() -> None:
    records = dict(RECORDS)
    (gone,) = [cell for cell in first_stage(STUDY) if cell.variant == "g-lion" and cell.flags["lr"] == 0.01]
    del records[gone.key]
    assert {choice.variant for choice in choose(STUDY, records).values()} == {"dlion-mavo", "terngrad"}


def test_the_rule_is_written_down() -> None:
    told_by = to_json(STUDY, choose(STUDY, RECORDS))
    assert told_by["rule"] == rule(STUDY)
    assert "for each method and place the setting" in told_by["rule"]
    assert "with the highest best_val_accuracy (value at workers 4, seed 1)" in told_by["rule"]
    assert told_by["choices"][0]["setting"] == {"lr": 0.001, "weight-decay": 0.1}


def test_without_tune_the_mean_over_all_seeds_decides() -> None:
    study = study_from({key: value for key, value in TOLD.items() if key != "tune"})

    def value(cell: Cell) -> float | None:
        lucky = cell.flags["lr"] == 0.01 and cell.seed == 42
        return 0.9 if lucky else 0.5 if cell.flags["lr"] == 0.001 else 0.2

    found = choose(study, run_all(study, value))
    assert found["g-lion", "workers 16"].point["lr"].label == 0.001
    assert found["g-lion", "workers 16"].value == pytest.approx(0.5)


def test_means_spreads_and_differences() -> None:
    (row,) = [row for row in RESULTS.rows if row.variant == "g-lion" and row.place == {"workers": 16}]
    values = [0.58 + 0.02 - 0.016 + 0.0005 * bonus for bonus in (2, 2, 2)]
    assert row.values("best_val_accuracy") == pytest.approx(values)
    assert row.mean("best_val_accuracy") == pytest.approx(0.585) and row.spread("best_val_accuracy") < 1e-9
    assert RESULTS.difference(row) == pytest.approx((-0.02, 0.0), abs=1e-9)
    assert RESULTS.difference(RESULTS.rows[0]) is None


def test_a_seed_that_diverged_is_a_result_and_not_a_number() -> None:
    (row,) = [row for row in RESULTS.rows if row.variant == "terngrad" and row.place == {"workers": 4}]
    assert row.diverged == 1 and len(row.values("best_val_accuracy")) == 2
    said = next(line for line in best_rows(RESULTS, ["best_val_accuracy"]) if line[:2] == ["4", "terngrad"])
    assert "29.70 ± 0.00, 1 of 3 diverged" in said


def test_the_table_says_what_was_run_and_where_the_grid_ended() -> None:
    text = markdown(RESULTS)
    assert "# Votes <and> sums" in text and "- Images shrunk from 32 to 16 pixels." in text
    assert "| 8 | dlion-mavo | 0.001 (edge) | 0.1 |  | 61.30 ± 0.00 |  | 61.30 ± 0.00 |" in text
    assert "torch 2.13.0+cpu" in text and "CIFAR-10 (SHA-256 abababababababab…)" in text
    assert "| 4 | g-lion | 0.01 | 0.1 |  | 57.65 | 57.65 |" in text  # of the grid
    assert rule(STUDY) in text


def test_what_was_not_run_is_told() -> None:
    few = dict(list(RECORDS.items())[:-2])
    assert "of 3 not run" in markdown(Results(STUDY, few))
    assert "Nothing has run yet" in markdown(Results(STUDY, {}))


def test_remarks_are_those_that_the_table_needs() -> None:
    assert DIVERGED in remarks(RESULTS) and EDGE in remarks(RESULTS) and SPREAD in remarks(RESULTS)
    hopeless = Results(STUDY, run_all(STUDY, lambda cell: None if cell.variant == "g-lion" else quality(cell)))
    assert "Not in the table, since cells are missing or every setting diverged: g-lion." in remarks(hopeless)
    single = study_from({"train": {"task": "text"}, "metric": "val_loss", "vary": {"method": ["g-lion"], "seed": [1]}})
    assert remarks(Results(single, {first_stage(single)[0].key: recorded(first_stage(single)[0], 0.5)})) == []


def test_the_terminal_shows_the_same_table() -> None:
    said = io.StringIO()
    show(RESULTS, said)
    assert "\x1b" not in said.getvalue()
    assert said.getvalue().count("dlion-mavo  0.001 (edge)") == 3 and "last loss" not in said.getvalue()


def test_csv_has_every_cell_unrounded() -> None:
    lines = list(csv.DictReader(io.StringIO(csv_of(RESULTS))))
    best = [line for line in lines if line["table"] == "best"]
    assert len(best) == 3 * (3 + 2 + 2) and len(lines) == len(best) + 5
    assert best[0]["workers"] == "4" and float(best[0]["best_val_accuracy"]) == pytest.approx(0.617)
    assert sum(line["diverged"] == "1" for line in best) == 2


def test_json_holds_the_same_and_no_number_that_json_does_not_know() -> None:
    told_by = json.loads(json.dumps(json_of(RESULTS), allow_nan=False))
    assert study_from(told_by["study"]) == STUDY
    assert len(told_by["best"]) == 7 and len(told_by["grid"]) == 5
    row = next(one for one in told_by["best"] if one["method"] == "terngrad")
    assert row["diverged"] == 1 and math.isclose(row["best_val_accuracy"]["mean"], 0.297)
