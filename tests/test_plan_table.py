"""Guards docs/plan.md: its tables are made from measured steps, and the plan is within 20 % of them."""

from dataclasses import replace
from pathlib import Path

import plan_table
import pytest
from network_experiments import EXPERIMENTS
from network_results import read
from plan_table import JUDGED, JUDGED_LINKS, RESULTS, WITHIN, Comparison, compared

from dlion.train.plan.work import Step, Work, step_of

DOCS = Path(__file__).resolve().parent.parent / "docs" / "plan.md"


def judged() -> list[Comparison]:
    return [one for one in compared(read(RESULTS, EXPERIMENTS)) if one.is_judged]


def test_the_plan_is_near_what_was_measured() -> None:
    found = judged()
    measured = {(one.experiment.name, one.contender) for one in found}
    assert measured >= {(link, contender) for link in JUDGED_LINKS for contender in JUDGED}  # of four workers
    assert not [(one.experiment.name, one.contender, one.deviation) for one in found if abs(one.deviation) > WITHIN]


def test_bytes_are_those_that_were_counted() -> None:
    for one in compared(read(RESULTS, EXPERIMENTS)):
        assert one.sent == pytest.approx(one.counted, abs=1), (one.experiment.name, one.contender)


def mutant(term: str) -> object:
    """The model with one of its terms forgotten; the bare exchange stays as it is."""

    def mutated(work: Work, *where: object) -> Step:
        return replace(step_of(work, *where), **{term: 0.0})  # type: ignore[arg-type]

    return mutated


@pytest.mark.parametrize("term", ["compute", "exposed"])
def test_a_model_without_a_term_is_far_off(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_table, "step_of", mutant(term))
    assert any(abs(one.deviation) > WITHIN for one in judged())


def test_the_documents_tables_are_those_of_its_results(tmp_path: Path) -> None:
    document = tmp_path / "plan.md"
    document.write_text(DOCS.read_text(encoding="utf-8"), encoding="utf-8")
    assert plan_table.main(["--docs", str(document)]) == 0
    assert document.read_text(encoding="utf-8") == DOCS.read_text(encoding="utf-8")


def test_what_was_not_measured_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    rows = plan_table.judged_rows([one for one in judged() if one.experiment.name == "100mbit"])
    assert len(rows) == 2 + 2 * len(JUDGED_LINKS) * len(JUDGED)
    assert sum("not measured" in row for row in rows) == len(rows) - 2 - len(JUDGED)
    worse = replace(judged()[0], planned=10.0)
    assert "**no**" in "".join(plan_table.judged_rows([worse]))


def test_without_results_there_is_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_table.main(["--results", str(tmp_path)]) == 2
    assert "run bench/network.py" in capsys.readouterr().err
