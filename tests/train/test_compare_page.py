"""Guards what readers see of a study: the page, its drawings, and how variants are told apart."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from compare_study import STUDY, run_all, told
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from page_reader import Page

from dlion.train.compare import figures
from dlion.train.compare.choose import rule
from dlion.train.compare.looks import look
from dlion.train.compare.page import page_of
from dlion.train.compare.results import Results
from dlion.train.compare.study import study_from

RESULTS = Results(STUDY, run_all(STUDY))


def test_the_page_is_one_file_that_says_it_all() -> None:
    text = page_of(RESULTS, 100.0, None).decode()
    page = Page(text)
    said = " ".join(" ".join(page.words).split())
    assert page.open == [] and all(link.startswith("#") for link in page.links)
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    for title in (
        "Accuracy against epochs",
        "Best accuracy against workers",
        "Error against bits",
        "Loss against bytes",
    ):
        assert f"<h2>{title}</h2>" in text
    assert "Votes <and> sums" in said and "Images shrunk from 32 to 16 pixels." in said and rule(STUDY) in said
    assert "1 of 3 diverged" in said and "0.001 (edge)" in said and "61.70 ± 0.00" in said
    assert "ms of computing a step and worker (the median over these runs, on this machine)" in said
    panels = {"workers 4": 4, "workers 8": 4, "workers 16": 4}
    assert {caption: text.count(f"<figcaption>{caption}</figcaption>") for caption in panels} == panels
    assert "(as given)" in page_of(RESULTS, 10.0, 5.0).decode()


def test_a_study_without_results_makes_a_page() -> None:
    assert b"Nothing has run yet" in page_of(Results(STUDY, {}), 100.0, None)


def test_text_has_losses_and_no_accuracy() -> None:
    study = study_from(told(metric="val_loss"))
    records = run_all(study)
    for record in records.values():
        record |= {"val_accuracy": None, "best_val_accuracy": None}
        del record["curve"]["val_accuracy"]
    text = page_of(Results(study, records), 100.0, None).decode()
    assert "<h2>Loss against epochs</h2>" in text and "<h2>Best loss against workers</h2>" in text
    assert "ccuracy" not in text


def test_variants_differ_without_colours_and_with_them() -> None:
    looks = [look(number) for number in range(12)]
    assert len({(one["color"], one["linestyle"]) for one in looks}) == 12
    assert len({(one["linestyle"], one["marker"]) for one in looks}) == 12  # printed in grey
    assert len({one["marker"] for one in looks}) >= 11


def drawn(draw: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> Axes:
    """What `draw` paints, before it becomes paths."""
    axes: Axes = Figure().subplots()
    monkeypatch.setattr(figures, "drawing", lambda paint, *_: paint(axes) or "drawn")
    assert draw() == "drawn"
    return axes


def test_accuracy_is_drawn_against_epochs_as_a_mean_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(lambda: figures.curves(RESULTS, {"workers": 4}, figures.epochs(), "accuracy", "a"), monkeypatch)
    first = axes.get_lines()[0]
    assert list(first.get_xdata()) == [0, 1, 2]
    assert list(first.get_ydata()) == pytest.approx([10, 0.8 * 61.7, 61.7])
    assert [len(one.get_xdata()) for one in axes.get_lines()] == [3, 3, 3]  # terngrad by the seeds that did not diverge


def test_loss_is_drawn_against_bytes_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(lambda: figures.curves(RESULTS, {"workers": 4}, figures.megabytes(), "loss", "a"), monkeypatch)
    assert list(axes.get_lines()[1].get_xdata()) == pytest.approx([48 * 125 * 20 / 1e6, 48 * 125 * 40 / 1e6])
    axes = drawn(lambda: figures.curves(RESULTS, {"workers": 4}, figures.seconds(8.0, 0.01), "loss", "a"), monkeypatch)
    assert list(axes.get_lines()[1].get_xdata()) == pytest.approx([0.2 + 0.12, 0.4 + 0.24])


def test_the_best_is_drawn_against_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(lambda: figures.against_axis(RESULTS, "workers", {"workers": None}, "a"), monkeypatch)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["4", "8", "16"]
    mavo = axes.containers[0][0]
    assert list(mavo.get_ydata()) == pytest.approx([61.7, 61.3, 60.5])
    assert len(axes.containers) == 3


def test_error_is_drawn_against_counted_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(lambda: figures.for_bits(RESULTS, {"workers": 4}, "a"), monkeypatch)
    points = [(float(c[0].get_xdata()[0]), float(c[0].get_ydata()[0])) for c in axes.containers]
    assert points[:2] == [pytest.approx((1.5, 38.3)), pytest.approx((48.0, 40.3))]


def test_an_axis_may_hold_words(monkeypatch: pytest.MonkeyPatch) -> None:
    vary: dict[str, Any] = {"method": ["dlion-mavo", "g-lion"], "iid": [True, False], "workers": [4], "seed": [1]}
    study = study_from(told(vary=vary, grid={"lr": [0.1]}, tune={"seed": 1}))
    results = Results(study, run_all(study))
    axes = drawn(lambda: figures.against_axis(results, "iid", {"iid": None, "workers": 4}, "a"), monkeypatch)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["yes", "no"]
