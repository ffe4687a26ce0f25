"""Guards bench/gpu.py, on a CPU: it runs through, its table and file say the same, and wrong kernels are found."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import gpu_checks
import gpu_rates
import pytest
import torch

from dlion.ops import reference

CPU = torch.device("cpu")


@pytest.mark.processes
def test_it_runs_and_every_bit_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--largest", "1e5", "--workers", "2", "--rounds", "1", "--json", str(tmp_path / "g")]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    with pytest.raises(SystemExit):
        gpu.main()  # rates on a CPU need not be a GPU's
    said = capsys.readouterr().out
    rows = json.loads((tmp_path / "g").read_text())["rows"]
    assert {row["part"] for row in rows} == {"bits", "replicas", "kernels", "steps", "small", "devices"}
    assert all(row["held"] for row in rows if row["part"] in ("bits", "replicas"))
    assert all(row["what"] in said for row in rows)
    sent = next(row for row in rows if row["what"].startswith("bits sent"))
    assert 1.0 <= sent["figure"] < 1.05


@pytest.mark.parametrize(("error", "ended"), [(KeyboardInterrupt(), "interrupted"), (OSError("lost"), "OSError: lost")])
def test_what_was_found_is_written_whatever_ends_it(error: BaseException, ended: str, tmp_path: Path) -> None:
    def rows() -> Any:
        yield gpu.Row("bits", "ballots", 0.0, "", "0", True)
        raise error

    report = gpu.Report(tmp_path / "g", {}, [])
    if isinstance(error, KeyboardInterrupt):
        assert gpu.measured(report, rows(), CPU) == 130
    else:
        with pytest.raises(OSError, match="lost"):
            gpu.measured(report, rows(), CPU)
    told = json.loads(report.file.read_text())
    assert told["ended"] == ended and [row["what"] for row in told["rows"]] == ["ballots"]


@pytest.mark.processes
def test_a_process_that_dies_ends_the_measurement_and_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildProcessError, match=r"the process of device [01] ended with status 1"):
        gpu_rates._of_all(2, "no such device", 8, 1)
    assert "no such device" in capfd.readouterr().err


def without(name: str, change: Any) -> Any:
    """The reference with one kernel replaced."""
    return SimpleNamespace(**vars(reference) | {name: change})


@pytest.mark.slow
def test_a_kernel_that_is_wrong_in_one_bit_is_found() -> None:
    def ballot(*arguments: Any) -> Any:
        words, finite = reference.ballot(*arguments)
        words[..., -1] ^= 1 << 40
        return words, finite

    def majority(ballots: torch.Tensor, first_word: int, t: int, ties: str) -> torch.Tensor:
        return reference.tally_majority(ballots, first_word + (ties == "alternate"), t, ties)

    def apply(params: list[torch.Tensor], *rest: Any) -> None:
        reference.apply(params, *rest)
        params[-1].view(-1)[-1] += 1

    for name, change in (("ballot", ballot), ("tally_majority", majority), ("apply", apply)):
        found = list(gpu_checks.correctness(without(name, change), CPU))
        assert [row.held for row in found].count(False) == 1
    assert all(row.held for row in gpu_checks.correctness(reference, CPU))


def test_values_are_compared_to_the_bit() -> None:
    largest = torch.finfo(torch.float32).max
    pairs = [(0.0, -0.0), (float("inf"), largest), (float("nan"), 0.0), (1.0, 1.0 + 2**-23)]
    assert not any(gpu_checks.same(torch.tensor([a]), torch.tensor([b])) for a, b in pairs)
    assert gpu_checks.same(torch.tensor([float("nan"), -0.0]), torch.tensor([-float("nan"), -0.0]))


@pytest.mark.parametrize("options", [["--largest", "3"], ["--rounds", "0"], []])
def test_what_it_cannot_do_is_said_in_one_sentence(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2 and "gpu.py: error: " in capsys.readouterr().err
