"""Guards what readers see of a measurement: the page and its drawings, the table, names and flags."""

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from bench_result import RESULT, changed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from page_reader import Page

from dlion.cli import main
from dlion.train.bench import bars
from dlion.train.bench.page import page_of
from dlion.train.bench.sentence import shown
from dlion.train.bench.settings import FLAGS
from dlion.train.bench.table import COLUMNS_MEAN, PHASES_MEAN, show


def test_the_page_is_one_file_that_says_it_all() -> None:
    text = page_of(RESULT).decode()
    page = Page(text)
    said = " ".join(" ".join(page.words).split())
    assert page.open == [] and all(link.startswith("#") for link in page.links)
    assert RESULT["sentence"] in said and "a <fine> & fast one" in said
    assert text.count("<svg") == 4
    assert len(re.findall(r' id="([^"]*)"', text)) == len(set(re.findall(r' id="([^"]*)"', text)))
    for figure in ("25.4 s", "503 ms", "29.4 MB", "48.00", "24.9 to 24.9"):
        assert figure in said
    assert "effective rate of 9.19 Mbit/s for this small exchange, latency included" in said
    assert "Both lines are lower bounds" in said and PHASES_MEAN in said and "PowerSGD has no line" in said


def test_the_bare_exchange_is_not_on_the_axis_of_bandwidths(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(bars.bandwidths, RESULT, monkeypatch)
    upright = [line for line in axes.get_lines() if len(set(line.get_xdata())) == 1]
    assert [line.get_xdata()[0] for line in upright] == [3210e6]  # the break-even alone


def test_axes_say_bits_and_seconds_as_people_do(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(bars.bandwidths, RESULT, monkeypatch)
    axes.figure.canvas.draw()
    for axis, expected in ((axes.xaxis, {"10 M", "100 M", "1 G", "10 G"}), (axes.yaxis, {"100 ms", "1 s", "10 s"})):
        assert expected <= {text.get_text() for text in axis.get_ticklabels()}
    assert axes.get_xlabel() == "bit/s"


def test_figures_stay_whole_and_sections_together() -> None:
    text = page_of(RESULT).decode()
    assert text.count('<div class="grid" tabindex="0"><table>') == 2  # the phases and the figures
    assert ".grid { overflow-x: auto; }" in text and ".grid table { white-space: nowrap;" in text
    assert len(re.findall(r'<section style="break-inside: avoid"><h2>', text)) == 5


def drawn(draw: Callable[[dict[str, Any]], str], result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Axes:
    """What `draw` paints, before it becomes paths."""
    axes: Axes = Figure().subplots()
    monkeypatch.setattr(bars, "drawing", lambda paint, *_: paint(axes))
    draw(result)
    return axes


@pytest.mark.parametrize("name", ["no communication", "ddp fp32", "powersgd 2", "dlion"])
def test_one_contender_alone_makes_a_page_and_a_table(name: str) -> None:
    alone = changed(contenders={name: RESULT["contenders"][name]}, break_even=None, interface=None)
    alone["contenders"][name] |= {"interface_sent": None}
    if name != "dlion":
        alone["phases"] = None
    assert f"<th>{shown(name)}</th>" in page_of(alone).decode()
    said = io.StringIO()
    show(alone, said)
    assert f"\n{shown(name)} " in said.getvalue()


def test_the_table_is_plain_and_whole_where_there_is_no_terminal() -> None:
    said = io.StringIO()
    show(RESULT, said)
    lines = said.getvalue().splitlines()
    assert "\x1b" not in said.getvalue() and "…" not in said.getvalue()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["ddp-fp32"] == "25.4 s 24.9 24.9 to 24.9 25.3 s 29.4 MB 48.00 29.5 MB".split()
    assert rows["no-communication"][-4:] == ["0", "B", "900", "B"]
    assert rows["no-communication"][6] == "0"  # exposed
    assert {*COLUMNS_MEAN, PHASES_MEAN} <= set(lines)  # one line each


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    said = io.StringIO()
    wide = copy.deepcopy(RESULT)
    wide["ratios"]["ddp fp32"] = {"median": 124.9, "low": 99.95, "high": 1311.2}
    wide["ratios"]["no communication"] = {"median": 0.925, "low": 0.899, "high": 9.994}
    show(wide, said)
    rows = [line for line in said.getvalue().splitlines() if line.startswith(("ddp-fp32", "no-comm"))]
    assert max(map(len, rows)) <= 80
    assert "125 100.0 to 1311" in rows[1] and "0.93 0.90 to 9.99" in " ".join(rows[0].split())


def test_names_are_those_that_the_flag_takes() -> None:
    names = ["no communication", "ddp fp32", "ddp fp16", "powersgd 2", "dlion", "dlion overlap"]
    assert tuple(map(shown, names)) == FLAGS


def test_help_writes_values_as_a_shell_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "[default: 1.0 5.0 25.0]" in said and f"[default: {' '.join(FLAGS)}]" in said
    assert "--contenders ddp-fp32 dlion" in said and "('" not in said
