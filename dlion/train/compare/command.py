"""`dlion compare` from its flags to its files."""

import platform
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

import dlion
from dlion.train.compare import choose
from dlion.train.compare.cells import Cell, first_stage, key_of, second_stage, unchosen
from dlion.train.compare.folder import Comparable, Record, StudyFolder
from dlion.train.compare.report import write_reports
from dlion.train.compare.schedule import Schedule, listening
from dlion.train.compare.screen import Screen
from dlion.train.compare.settings import CompareConfig
from dlion.train.compare.study import Study, read_study
from dlion.train.found_ranks import is_found
from dlion.train.jobs import check, steps_per_epoch, task_of

DEFAULT_OUT = Path("compare-runs")


def run(config: CompareConfig, study: Study | None, out: Path, *, table_only: bool) -> int:
    """Run what is not recorded yet in `out`, write the reports, and return the exit status of the command.

    study: None goes on with the one that the folder holds.

    0: all cells are recorded, or the time was up before; 1: cells crashed; 130, 143, 129: a signal ended it.

    Raises:
        ValueError: a mistake of the user, in one sentence.
    """
    if is_found():
        raise ValueError("dlion compare starts its own workers: run it without a launcher.")
    folder = StudyFolder(out)
    if (study is None or table_only) and not folder.study_file.exists():
        raise ValueError(f"{out} holds no study (it has no study.toml): describe one by --config or by flags.")
    torch.set_num_threads(1)
    study = settle(study or read_study(folder.study_file), config.data)
    if table_only:
        folder.refuse_another(study.anywhere())
        write_reports(folder, study, folder.records(), config.mbit, config.step_ms)
        return 0
    cells, later = first_stage(study), unchosen(study) if study.tune is not None else []
    check_all([*cells, *later])
    check_metric([*cells, *later], choose.metric_of(study))
    planned = {cell.key: cell.work for cell in cells} | {f"?{cell.key}": cell.work for cell in later}
    with folder.held():
        return _run(config, study, folder, planned)


def settle(study: Study, data: str | None) -> Study:
    """The study with its metric, its data where they are here, and no stage that has nothing to do."""
    if data is not None:
        study = replace(study, train={**study.train, "data": data})
    if choose.unsearched(study):
        study = replace(study, tune=None)
    if study.metric is None:
        task = task_of(first_stage(study)[0].config)
        study = replace(study, metric="val_accuracy" if task.metric == "accuracy" else "val_loss")
    return study


def check_metric(cells: Iterable[Cell], metric: str) -> None:
    """Find out before a cell runs that its task does not have the metric of the study.

    Raises:
        ValueError: it has not.
    """
    for config in {cell.config.task: cell.config for cell in cells}.values():
        if choose.higher_is_better(metric) and task_of(config).metric != "accuracy":
            raise ValueError(
                f"metric {metric} was given and task {config.task} has no accuracy: choose val_loss or best_val_loss."
            )


def _run(config: CompareConfig, study: Study, folder: StudyFolder, planned: dict[str, float]) -> int:
    deadline = None if config.limit_minutes is None else time.monotonic() + 60 * config.limit_minutes
    cells = first_stage(study)
    folder.claim(study.anywhere())
    records = folder.records()
    refuse_other_versions(records, folder.path)
    comparable = Comparable(folder.path)
    for record in records.values():
        comparable.admit(record)
    with listening(deadline) as stop, Screen(planned, records) as screen:
        schedule = Schedule(folder, records, comparable, config.jobs, stop, screen, epoch_steps)
        schedule.run(cells)
        chosen = choose.choose(study, records)
        finals: list[Cell] = []
        if study.tune is not None and not stop.asked:
            folder.write_chosen(choose.to_json(study, chosen))
            finals = second_stage(study, {key: choice.point for key, choice in chosen.items()})
            screen.plan(finals)
            screen.recorded(records)
            schedule.run(finals)
        left = [cell for cell in [*cells, *finals] if cell.key not in records]
        up = stop.time_is_up and bool(left)
    if study.tune is None:
        folder.write_chosen(choose.to_json(study, chosen))
    write_reports(folder, study, records, config.mbit, config.step_ms)
    return _farewell(schedule, len(left), up)


def check_all(cells: Iterable[Cell]) -> None:
    """Find a user's mistake before a cell runs: every name, value and flag, and the data.

    Raises:
        ValueError: there is one.
    """
    seen = set()
    for cell in cells:
        kind = key_of({flag: value for flag, value in cell.flags.items() if flag not in ("lr", "weight-decay", "seed")})
        config = cell.config
        if kind not in seen:
            seen.add(kind)
            check(config, cell.workers)


def epoch_steps(cell: Cell) -> int:
    """Steps after which each worker has seen as many samples as the training set has."""
    config = cell.config
    steps = steps_per_epoch(config, cell.batch_sizes, task_of(config).info.train_size)
    return max(1, steps)  # a stream has no epochs: each step counts as one


def refuse_other_versions(records: Mapping[str, Record], where: Path) -> None:
    """Find out before a cell runs that it could not be compared with those in the folder.

    Raises:
        ValueError: they were made by other versions.
    """
    here = {
        "dlion": dlion.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    for record in list(records.values())[:1]:
        for name, version in here.items():
            held = record["versions"].get(name)
            if held != version:
                raise ValueError(
                    f"{where} holds cells made with {name} {held} and this is {name} {version}: they cannot be "
                    "compared, so take another --out."
                )


def _farewell(schedule: Schedule, left: int, up: bool) -> int:
    if schedule.stop.signal:
        print("dlion: stopped; the same command goes on where it was", file=sys.stderr)
        return 128 + schedule.stop.signal
    for error in schedule.errors.values():
        print(f"dlion: {error}", file=sys.stderr)
    if up:
        print(f"The time is up with {left} cells or more to go: the same command goes on.")
    return 1 if schedule.errors else 0
