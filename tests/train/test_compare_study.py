"""Guards what a study is: its file, the cells it asks for, their order and identity, and what may join it."""

import tomllib
from datetime import date, time
from pathlib import Path
from typing import Any

import pytest
from compare_study import STUDY, TOLD, told

from dlion.methods import METHODS
from dlion.train.compare.cells import first_stage, second_stage, unchosen
from dlion.train.compare.choose import choose
from dlion.train.compare.settings import CompareConfig, study_of
from dlion.train.compare.study import read_study, study_from, toml_of

STUDIES = Path(__file__).resolve().parents[2] / "docs" / "studies"


def test_a_study_survives_its_file() -> None:
    bundled = told(vary={**TOLD["vary"], "batch": [{"label": "N=4, global 32", "batch-size": 8, "accumulate": 1}, 3]})
    for study in (STUDY, study_from(bundled)):
        assert study_from(tomllib.loads(toml_of(study))) == study


def test_the_first_stage_is_the_grid_where_tune_says() -> None:
    cells = first_stage(STUDY)
    assert {(cell.workers, cell.seed) for cell in cells} == {(4, 1)}
    by_variant = {name: [cell.flags["lr"] for cell in cells if cell.variant == name] for name in STUDY.variants}
    assert by_variant == {"dlion-mavo": [0.001, 0.01], "g-lion": [0.001, 0.01], "terngrad": [0.1]}
    assert {cell.flags.get("keep") for cell in cells} == {None, 0.04}


def test_the_second_stage_takes_the_chosen_setting_everywhere() -> None:
    cells = unchosen(STUDY)
    assert len(cells) == 3 * (3 + 2 + 2)
    assert [cell.workers for cell in cells if cell.variant == "dlion-mavo" and cell.seed == 42] == [4, 8, 16]
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)  # the first pass compares all
    assert second_stage(STUDY, choose(STUDY, {}) and {}) == []


def test_without_tune_the_grid_runs_everywhere_with_every_seed() -> None:
    study = study_from({key: value for key, value in TOLD.items() if key != "tune"})
    assert len(first_stage(study)) == 3 * (2 * 3 + 2 * 2 + 1 * 2)


def test_an_axis_that_is_not_tuned_at_one_value_is_tuned_at_each() -> None:
    batches = [{"label": f"global {4 * size}", "batch-size": size, "workers": 4} for size in (8, 32)]
    vary = {"method": ["g-lion", "g-adamw"], "batch": batches, "seed": [1, 2]}
    study = study_from(told(vary=vary, grid={"lr": [0.1, 0.2]}, tune={"seed": 9}))
    assert [
        (cell.flags["batch-size"], cell.flags["lr"]) for cell in first_stage(study) if cell.variant == "g-lion"
    ] == [
        (8, 0.1),
        (8, 0.2),
        (32, 0.1),
        (32, 0.2),
    ]


def test_a_table_is_pinned_by_its_label() -> None:
    batches = [{"label": "small", "batch-size": 8}, {"label": "large", "batch-size": 64}]
    vary = {"method": ["g-lion"], "batch": batches, "seed": [1]}
    study = study_from(told(vary=vary, grid={"lr": [0.1, 0.2]}, tune={"seed": 9, "batch": "large"}))
    assert {cell.flags["batch-size"] for cell in first_stage(study)} == {64}
    with pytest.raises(ValueError, match=r"unknown batch in .tune. 'larger': did you mean large"):
        study_from(told(vary=vary, grid={}, tune={"seed": 9, "batch": "larger"}))


def test_variants_need_not_be_methods() -> None:
    rules = [{"label": "rotate"} | {"lr": 0.1}, {"label": "zero", "lr": 0.2, "overlap": True}]
    study = study_from({"compare": "rule", "train": {"task": "text"}, "vary": {"rule": rules, "seed": [1]}})
    flags = [cell.arguments for cell in first_stage(study)]
    assert flags[1] == ["--task", "text", "--lr", "0.2", "--overlap", "--seed", "1"]


def test_simulated_workers_are_asked_for_by_their_own_flag() -> None:
    study = study_from(told(simulate=True))
    cell = first_stage(study)[0]
    assert cell.flags["simulate"] == 4 and "workers" not in cell.flags and cell.workers == 4


def test_where_the_data_lie_is_no_part_of_a_cell() -> None:
    moved = study_from(told(train={**TOLD["train"], "data": "elsewhere"}))
    ours, theirs = first_stage(STUDY)[0], first_stage(moved)[0]
    assert ours.key == theirs.key and ours.name == theirs.name
    assert theirs.arguments[:2] == ["--data", "elsewhere"]
    assert moved.differences(STUDY) == []


def test_names_are_distinct_and_fit_a_folder() -> None:
    cells = [*first_stage(STUDY), *unchosen(STUDY)]
    names = {cell.name for cell in cells}
    assert len(names) == len({cell.key for cell in cells}) and max(map(len, names)) < 140
    assert not any("/" in name or " " in name for name in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"task": "cifar10", "steps": 41}}, "steps is 40 there and 41 here"),
        ({"train": {"task": "cifar10"}}, "steps is 40 there and not set here"),
        ({"metric": "val_loss"}, "metric is"),
        ({"tune": {"workers": 16, "seed": 1}}, "the grid is searched at"),
        ({"grid": {"lr": [0.001, 0.01], "terngrad": TOLD["grid"]["terngrad"]}}, "has lr, weight-decay there"),
        ({"grid": {**TOLD["grid"], "lr": [0.001]}}, "lr 0.01 of dlion-mavo is there and not here"),
        ({"vary": {**TOLD["vary"], "seed": [42, 52]}}, "seed 62 of dlion-mavo is there"),
        ({"vary": {**TOLD["vary"], "method": ["dlion-mavo", "terngrad"]}}, "method g-lion is there"),
    ],
)
def test_a_study_may_grow_and_nothing_else(changes: dict[str, Any], message: str) -> None:
    (difference,) = study_from(told(**changes)).differences(STUDY)[:1]
    assert message in difference


def test_more_seeds_methods_and_settings_are_no_difference() -> None:
    grown = told(
        vary={**TOLD["vary"], "method": [*TOLD["vary"]["method"], "g-adamw"], "seed": [42, 52, 62, 72]},
        grid={**TOLD["grid"], "lr": [0.001, 0.01, 0.1]},
    )
    assert study_from(grown).differences(STUDY) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": "val_loss"}, "unknown key 'metrics': did you mean metric"),
        ({"metric": "accuracy"}, "unknown metric 'accuracy': did you mean"),
        ({"simulate": "yes"}, "simulate cannot be 'yes'"),
        ({"vary": {"method": ["g-lion"]}}, "nothing is said about seed"),
        ({"vary": {**TOLD["vary"], "workers": [4, 4]}}, "each only once"),
        ({"vary": {**TOLD["vary"], "workers": 4}}, "a list of values is expected"),
        ({"vary": {**TOLD["vary"], "dlion-mavi": {"workers": [2]}}}, "did you mean dlion-mavo"),
        ({"vary": {**TOLD["vary"], "lr": [1.0]}}, r"lr is both in \[vary\] and in \[grid\]"),
        ({"vary": {**TOLD["vary"], "batch": [{"batch-size": 3}]}}, "needs a label"),
        ({"vary": {**TOLD["vary"], "dlion-mavo": {"seed": []}}}, "must have one value or more"),
        ({"vary": {**TOLD["vary"], "dlion-mavo": {"worker": [2]}}}, "did you mean workers"),
        ({"vary": {**TOLD["vary"], "dlion-mavo": {"method": ["g-lion"]}}}, r"unknown axis in \[vary.dlion-mavo\]"),
        ({"grid": {"lr": [0.1], "terngrad": {"lr": []}}}, "must have one value or more"),
        ({"grid": {"lr": [0.1], "terngrad": {"workers": [2]}}}, r"workers in \[grid\] and workers in \[vary\]"),
        ({"vary": {**TOLD["vary"], "batch": [{"label": "a", "lr": 1.0}]}}, "lr of dlion-mavo is set by"),
        ({"vary": {**TOLD["vary"], "batch": [{"label": one, "batch-size": 3} for one in "ab"]}}, "set the same flags"),
        ({"grid": {"lr": [date(1979, 5, 27)]}}, "lr cannot be .*: give a number"),
        ({"train": {"task": "cifar10", "lr": time(7, 32)}}, "lr cannot be .*: give a number"),
        ({"tune": {"workers": 4}}, "must name the seed"),
        ({"tune": {"seed": 1, "worker": 4}}, "did you mean workers"),
    ],
)
def test_mistakes_are_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study_from(told(**changes))


def test_flags_make_a_study_too() -> None:
    config = CompareConfig(methods=("g-lion",), workers=(2, 4), iid="both", weight_decays=(0.0, 0.1), tune_seed=9)
    study = study_of(config, {"steps": 30})
    assert study.train == {"task": "fashion-mnist", "steps": 30}
    assert study.axes == ["workers", "iid"] and list(study.grid) == ["lr", "weight-decay"]
    assert {cell.workers for cell in first_stage(study)} == {2} and len(first_stage(study)) == 2 * 3 * 2
    assert study_from(tomllib.loads(toml_of(study))) == study


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_studies_of_this_repository_ask_for_runs_that_there_are(path: Path) -> None:
    study = read_study(path)
    cells = [*first_stage(study), *unchosen(study)]
    assert len({cell.key for cell in cells}) == len({cell.name for cell in cells})
    for cell in cells:
        assert cell.config.method in METHODS
    assert study.tune is None or study.tune["seed"] not in study.vary["seed"]  # winners of a search are partly lucky
    assert "metric" in path.read_text() and study.title and study.notes
