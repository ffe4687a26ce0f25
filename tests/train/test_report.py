"""Guards report.html: complete, legible text and curves, nothing loaded from elsewhere; and the two displays."""

import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from page_reader import Page

from dlion.train.config import TrainConfig, settle
from dlion.train.progress import Plain, Silent, Terminal, display
from dlion.train.report import write_report
from dlion.train.runs import RunFolder

SUMMARY: dict[str, Any] = {
    "task": "fashion-mnist",
    "model": "conv",
    "method": "dlion-mavo",
    "workers": 2,
    "params": 105_866,
    "steps": 20,
    "data": {"name": "a <set> & more", "sha256": "0" * 64},
    "val_loss": 0.5,
    "val_accuracy": 0.8125,
    "best_step": 15,
    "best_val_loss": 0.45,
    "best_val_accuracy": 0.8375,
    "bits_per_param_sent": 1.0,
    "bytes_sent": 2_000_000,
    "ratio": 31.9,
    "seconds": 1.5,
}


def written(folder: RunFolder, records: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    for record in records:
        folder.append(record)
    write_report(folder, folder.read_config(), summary)
    return folder.report_file.read_text("utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    config = settle(TrainConfig(steps=20), model="conv", workers=2, steps_per_epoch=10)
    return RunFolder.create(tmp_path, None, config)


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "bytes_sent": step * 1e5, "loss": 1 / (step + 1), **more}


def test_the_report_is_one_file_that_says_it_all(folder: RunFolder) -> None:
    lines = [record(step, **({"val_loss": 0.7, "val_accuracy": 0.5} if step % 5 == 0 else {})) for step in range(21)]
    text = written(folder, lines, SUMMARY)
    page = Page(text)
    assert page.open == []
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import", text)
    assert text.count("<svg") == 4
    names = re.findall(r' id="([^"]+)"', text)
    assert names and len(set(names)) == len(names)
    assert set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", text)) <= set(names)
    words = " ".join(page.words)
    for expected in (
        "81.25%",
        "105,866 parameters",
        "83.75%",
        "best accuracy, at step 15",
        "a <set> & more",
        "batch-size",
        "0" * 64,
    ):
        assert expected in words
    assert "<td></td>" not in text


def test_text_has_no_accuracy_and_a_loss_that_is_not_finite_leaves_a_gap(folder: RunFolder) -> None:
    lines = [record(0, val_loss=float("nan")), record(1, loss=float("inf")), record(2, val_loss=2.0)]
    summary = {key: value for key, value in SUMMARY.items() if "accuracy" not in key} | {"val_loss": None}
    text = written(folder, lines, summary)
    assert text.count("<svg") == 2
    assert "accuracy" not in text


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_table_and_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    shown = record(3, val_loss=0.25, val_accuracy=0.5, samples_per_s=12.0, bits_per_param_sent=1.5, ratio=31.7)
    terminal, pipe = FakeTerminal(), io.StringIO()
    assert isinstance(display(9, 1, pipe), Silent)
    for stream, kind in ((terminal, Terminal), (pipe, Plain)):
        screen = display(9, 0, stream)
        assert isinstance(screen, kind)
        screen.show(shown)
        screen.close()
        screen.say("[the end]")
    assert pipe.getvalue().splitlines()[0].startswith("step 3/9  loss 0.2500  val loss 0.2500  val acc 50.00%")
    assert "[the end]" in pipe.getvalue() and "[the end]" in terminal.getvalue()
    assert "samples/s" in terminal.getvalue() and "\x1b" in terminal.getvalue()


def test_a_closed_pipe_does_not_end_training() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Plain(9, Closed()).say("nobody listens")
