"""When elastic workers save: all who took part in a commit decide alike, and one that was missed is made up for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlion.phases import Phases
from dlion.train import elastic_launch
from dlion.train.config import LION_BETAS, Settled
from dlion.train.elastic_flags import ElasticFlags
from dlion.train.elastic_loop import ElasticRun, Trainee
from dlion.train.jobs import Place
from dlion.train.runs import RunFolder

CONFIG = Settled(model="conv", workers=3, steps=20, lr=1e-3, betas=LION_BETAS, save_every=8)


def a_run(step: int, notes: dict[int, Any]) -> ElasticRun:
    """One worker after `step`, with whose commit these notes came."""
    trainee = cast(Trainee, SimpleNamespace(optimizer=SimpleNamespace(notes=notes)))
    run = ElasticRun(CONFIG, RunFolder(Path("nowhere")), trainee, cast(Any, None), lambda: 0)
    run.progress.step = step
    return run


def notes(**owes: bool) -> dict[int, Any]:
    return {number: {"owes": owe} for number, owe in enumerate(owes.values())}


@pytest.mark.parametrize(("step", "saves"), [(7, False), (8, True), (9, False), (16, True), (20, True)])
def test_a_checkpoint_is_due_every_so_many_steps_and_at_the_end(step: int, saves: bool) -> None:
    run = a_run(step, notes(a=False, b=False))
    assert run._has_to_save() is saves and not run.owes


def test_who_has_heard_no_notes_owes_the_checkpoint_until_a_commit_brings_some() -> None:
    run = a_run(8, {})
    run._has_to_save()
    assert run.owes and run._note(0.5)["owes"]
    run.trainee.optimizer.notes = {}
    run.progress.step = 9
    run._has_to_save()
    assert run.owes
    run.progress.step, run.trainee.optimizer.notes = 10, notes(a=True, newcomer=False)
    assert run._has_to_save() and not run.owes


def test_a_worker_that_owes_nothing_saves_with_those_who_do() -> None:
    assert a_run(9, notes(a=True, newcomer=False))._has_to_save()


def test_a_stop_waits_for_a_commit_that_all_have_heard() -> None:
    run = a_run(5, {})
    run._last = 5
    assert not run._stops and not run._has_to_save()
    run.progress.step, run.trainee.optimizer.notes = 6, notes(a=False)
    assert run._stops and run._has_to_save()


def test_who_comes_back_when_all_is_trained_writes_the_results_that_nobody_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader died between the last checkpoint and them: all others had ended, and the run was called a failure."""
    folder, written = RunFolder(tmp_path), []
    folder.config_file.write_text("")

    def restored(run: ElasticRun) -> float:
        run.progress.step = CONFIG.steps
        return 0.0

    def finished(run: ElasticRun, _: object) -> None:
        folder.summary_file.write_text("{}")
        written.append(run.number)

    monkeypatch.setattr(ElasticRun, "_resume", restored)
    monkeypatch.setattr(ElasticRun, "_finish", finished)
    monkeypatch.setattr("dlion.train.elastic_loop.task_of", lambda config: None)
    for number, again in ((1, False), (2, True), (1, True)):
        trainee = cast(Trainee, SimpleNamespace(optimizer=SimpleNamespace(leader=None, phases=Phases())))
        told = cast(Any, SimpleNamespace(number=number, again=again))
        assert ElasticRun(CONFIG, folder, trainee, told, lambda: 0).train() == 0
    assert written == [2]


def test_a_run_that_is_resumed_before_its_first_checkpoint_says_where_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ElasticFlags(elastic=True)
    RunFolder.create(tmp_path, "run", CONFIG, flags.kept()).release()
    place = Place(out=tmp_path, name=None, resume=tmp_path / "run")
    with elastic_launch._opened(CONFIG, place, flags) as folder:
        assert folder is not None
    assert capsys.readouterr().out == f"{tmp_path / 'run'} has no checkpoint yet: the run begins again at step 0\n"
