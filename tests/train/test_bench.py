"""Guards `dlion bench`: its files and figures, flags that make no sense, signals, a rank that dies, torchrun."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import await_text, children, dlion, start

from dlion.train.bench.settings import FLAGS as FLAGS_OF_CONTENDERS

FLAGS = ["bench", "--width", "64", "--layers", "1", "--tokens", "8", "--device", "cpu"]
SMALL = [*FLAGS, "--workers", "2"]
EVERYBODY = ["no communication", "ddp fp32", "ddp fp16", "powersgd 2", "dlion", "dlion overlap"]
PHASES = ["compute", "ballot", "wait", "tally", "apply"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a short measurement, and what was said."""
    folder = tmp_path_factory.mktemp("measured")
    output, errors = dlion([*SMALL, "--seconds", "0.1"], folder)
    assert errors == ""
    return folder / "bench-runs" / "gpt-n2", output


@pytest.fixture(scope="module")
def result(measured: tuple[Path, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((measured[0] / "bench.json").read_text())
    return found


@pytest.mark.processes
def test_both_files_are_written_and_nothing_else(measured: tuple[Path, str]) -> None:
    assert sorted(path.name for path in measured[0].iterdir()) == ["bench.json", "index.html"]


@pytest.mark.processes
def test_every_contender_took_its_steps(result: dict[str, Any]) -> None:
    assert list(result["contenders"]) == EVERYBODY
    assert result["workers"] == 2 and result["rounds"] >= 3
    for found in result["contenders"].values():
        assert len(found["turns"]) == result["rounds"]
        assert len(found["steps"]) >= 3 and min(found["steps"]) > 0
        assert min(found["steps"]) <= found["seconds"] <= max(found["steps"])
        parts = found["parts"]
        assert parts["forward"] > 0 and parts["backward"] > 0 and parts["update"] > 0
    assert result["contenders"]["ddp fp32"]["bucket_cap_mb"] in (1, 5, 25)


@pytest.mark.processes
def test_ratios_to_dlion_are_of_the_steps_of_a_round(result: dict[str, Any]) -> None:
    assert list(result["ratios"]) == EVERYBODY
    assert set(result["ratios"]["dlion"].values()) == {1.0}
    dlion = result["contenders"]["dlion"]["turns"]
    for name, ratio in result["ratios"].items():
        by_round = [one / other for one, other in zip(result["contenders"][name]["turns"], dlion, strict=True)]
        assert min(by_round) <= ratio["low"] <= ratio["median"] <= ratio["high"] <= max(by_round)


@pytest.mark.processes
def test_bytes_agree_by_counter_formula_and_interface(result: dict[str, Any]) -> None:
    contenders, parameters = result["contenders"], result["parameters"]
    assert contenders["ddp fp32"]["sent_by_formula"] == 4 * parameters
    assert contenders["ddp fp16"]["sent_by_formula"] == 2 * parameters
    assert 0 < contenders["powersgd 2"]["sent_by_formula"] < contenders["ddp fp16"]["sent_by_formula"]
    assert contenders["ddp fp32"]["sent"] is None and contenders["no communication"]["sent_by_formula"] == 0
    for name in ("dlion", "dlion overlap"):
        # a small model: headers, and tensors that fill no word
        assert parameters / 8 <= contenders[name]["sent"] <= 1.1 * parameters / 8
        assert contenders[name]["sent_by_formula"] == parameters / 8
    if result["interface"] is not None:
        assert result["interface"] == {"name": "lo", "shared_by": 2}
        # other processes may use the loopback at the same time, so only from below
        assert contenders["ddp fp32"]["interface_sent"] > 4 * parameters
        assert contenders["dlion"]["interface_sent"] > contenders["dlion"]["sent"]


@pytest.mark.processes
def test_phases_and_the_bare_exchange_are_parts_of_a_step(result: dict[str, Any]) -> None:
    for key, name in (("phases", "dlion"), ("overlap_phases", "dlion overlap")):
        assert list(result[key]) == PHASES
        assert 0 < sum(result[key].values()) < 2 * max(result["contenders"][name]["steps"])
    bare = result["bare_exchange"]
    assert bare["payload"] == result["contenders"]["dlion"]["sent"]
    assert bare["mbit_per_s"] == pytest.approx(8e-6 * bare["payload"] / bare["seconds"])
    assert min(result["latency"].values()) > 0


@pytest.mark.processes
def test_settings_and_environment_name_no_machine(result: dict[str, Any]) -> None:
    assert result["settings"]["workers"] == 2 and result["settings"]["width"] == 64
    assert result["environment"]["threads"] == 1 and result["environment"]["backend"] == "gloo"
    assert os.uname().nodename not in json.dumps(result)


@pytest.mark.processes
def test_the_terminal_and_the_page_say_the_sentence(measured: tuple[Path, str], result: dict[str, Any]) -> None:
    folder, output = measured
    page = (folder / "index.html").read_text()
    assert result["sentence"].startswith("Measured here: ")
    assert result["sentence"] in " ".join(output.split())
    assert result["sentence"] in page
    assert all(character.isprintable() or character == "\n" for character in output)
    for flag in FLAGS_OF_CONTENDERS:
        assert f"\n{flag} " in output and f"<th>{flag}</th>" in page
    assert "written: bench-runs/gpt-n2/bench.json" in output


# Each rank is the first of its machine and has an --out of its own.
ALONE = 'LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 exec "$0" -m dlion "$@" --out found-by-$RANK'
AS_A_MACHINE = ("--no-python", "sh", "-c", ALONE, sys.executable)


@pytest.mark.processes
def test_torchrun_starts_the_same_and_other_machines_say_where_the_results_are(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *AS_A_MACHINE)
    some = ["--contenders", "dlion", "ddp-fp32", "--bucket-cap-mb", "2", "--vote", "average", "--seconds", "0.1"]
    process = start([*FLAGS, *some], tmp_path, torchrun)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert output.count("written: ") == 1
    where = f"{tmp_path / 'found-by-0'} on {os.uname().nodename}"
    assert output.count(f"rank 0 shows the results and writes them to {where}\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["found-by-0"]
    result = json.loads((tmp_path / "found-by-0/bench.json").read_text())
    assert list(result["contenders"]) == ["dlion", "ddp fp32"]
    assert result["workers"] == 2 and result["settings"]["vote"] == "average"
    assert result["overlap_phases"] is None


MISTAKES = {
    "one worker": (["--workers", "1"], "--workers must be at least 2"),
    "width of no head": (["--width", "100"], "--width must be a positive multiple of 64"),
    "no layers": (["--layers", "0"], "--layers must be at least 1"),
    "no tokens": (["--tokens", "0"], "--tokens must be at least 1"),
    "no batch": (["--batch-size", "0"], "--batch-size must be at least 1"),
    "no time": (["--seconds", "0"], "--seconds must be a finite number above 0"),
    "endless": (["--seconds", "inf"], "--seconds must be a finite number above 0"),
    "no such contender": (["--contenders", "horovod"], "ddp-fp32"),
    "a contender twice": (["--contenders", "dlion", "dlion"], "each only once"),
    "no such vote": (["--vote", "median"], "average"),
    "bucket of nothing": (["--bucket-cap-mb", "0"], "--bucket-cap-mb must be finite numbers above 0"),
    "results are there": (["--out", "full"], "holds a measurement already"),
    "in the way": (["--out", "full/bench.json"], "full/bench.json"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence_and_leaves_nothing(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dlion.cli import main

    arguments, expected = MISTAKES[mistake]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/bench.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1 and said.err.startswith("dlion: ")
    assert expected in said.err
    assert sorted(tmp_path.rglob("*")) == before


LONG = [*SMALL, "--contenders", "no-communication", "dlion", "--seconds", "1000", "--out", "long"]


def await_round(process: Any) -> list[int]:
    """Read the output until rounds have begun; the process ids of the ranks."""
    await_text(process, "round 1 ")
    return children(process)


@pytest.mark.processes
def test_nobody_needs_to_read_on(tmp_path: Path) -> None:
    """A closed pipe was taken for a rank that failed, and a closed output ended in a traceback."""
    flags = " ".join([*SMALL, "--seconds", "0.1", "--contenders", "no-communication", "dlion"])
    for name, end in (("piped", "| head -1"), ("closed", ">&-")):
        command = f"{sys.executable} -m dlion {flags} --out {name} {end}"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["bench.json", "index.html"]


@pytest.mark.processes
def test_ctrl_c_ends_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(LONG, tmp_path)
    ranks = await_round(process)
    assert len(ranks) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == ""
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    process = start(LONG, tmp_path)
    os.kill(await_round(process)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.count("\n") == 1 and "rank 1 failed: it was ended by SIGKILL (more in long/failure.log)" in errors
    assert [path.name for path in (tmp_path / "long").iterdir()] == ["failure.log"]
