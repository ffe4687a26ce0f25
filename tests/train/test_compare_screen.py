"""Guards what `dlion compare` tells while it runs: what is done, what failed, and how long the rest takes."""

import io
import re

import pytest
from compare_study import STUDY, recorded

from dlion.train.compare import screen
from dlion.train.compare.cells import first_stage, unchosen
from dlion.train.compare.screen import Screen

CELLS = first_stage(STUDY)
PLANNED = {cell.key: cell.work for cell in CELLS} | {f"?{cell.key}": cell.work for cell in unchosen(STUDY)}


class Clock:
    """Stands for the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(screen, "time", clock)
    monkeypatch.setenv("TERM", "xterm")
    return clock


def test_plain_lines_count_cells_and_work(clock: Clock) -> None:
    said = io.StringIO()
    with Screen(PLANNED, [CELLS[0].key], said) as shown:
        clock.now += 60
        shown.finished(CELLS[1], recorded(CELLS[1], 0.5))
        shown.finished(CELLS[2], recorded(CELLS[2], None))
        shown.failed(CELLS[3], "it ended with status 1")
        finals = unchosen(STUDY)
        shown.plan(finals)
        shown.recorded([finals[0].key])
    lines = said.getvalue().splitlines()
    assert "\x1b" not in said.getvalue()
    whole = len(PLANNED)
    assert lines[0].startswith(
        f"[2/{whole}] dlion-mavo workers=4 lr=0.01 weight-decay=0.1 seed=1: best accuracy 50.00%"
    )
    work = CELLS[1].work
    left = sum(PLANNED.values()) - 2 * work
    assert lines[0].endswith(f"about {60 / work * left / 60:.0f} min left")
    assert ": diverged, 2.0 s" in lines[1] and lines[2] == f"[4/{whole}] error: it ended with status 1"


def test_a_bar_knows_what_is_under_way(clock: Clock) -> None:
    said = Terminal()
    with Screen(PLANNED, [], said) as shown:
        shown.show([(CELLS[0], 0)])
        clock.now += 10
        shown.show([(CELLS[0], 20)])  # of 40 steps
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.getvalue())
    whole, half = sum(PLANNED.values()), CELLS[0].work / 2
    assert "time left unknown yet" in text and "1 running, step 20" in text
    assert f"about {10 * (whole - half) / half / 60:.0f} min left" in text
