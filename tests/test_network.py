"""Guards the script behind docs/benchmarks.md: what counts as a figure, resuming, skipping, and the tables."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import network
import network_experiments
import network_table
import pytest
from documents import fill
from links import LinkError
from network_experiments import EXPERIMENTS, TARGETS, Experiment, RefusedError, check_link
from network_results import ResultsError, file_of, keep, read

Record = dict[str, Any]
DOCS = Path(__file__).parent.parent / "docs" / "benchmarks.md"
SECONDS = {
    "no communication": 0.1,
    "ddp fp32": 2.6,
    "ddp fp16": 1.3,
    "powersgd 2": 0.25,
    "dlion": 0.2,
    "dlion overlap": 0.16,
}


def experiment(name: str) -> Experiment:
    return next(one for one in EXPERIMENTS if one.name == name)


def bench_run(slowdown: float = 1.0, exchange_seconds: float = 0.092, **changed: float | None) -> Record:
    taken = SECONDS | {name.replace("_", " "): value for name, value in changed.items()}
    return {
        "contenders": {name: {"seconds": slowdown * value} for name, value in taken.items() if value is not None},
        "phases": {"compute": 0.1, "ballot": 0.004, "wait": 0.092, "tally": 0.001, "apply": 0.003},
        "bare_exchange": {"payload": 920_000, "seconds": exchange_seconds},
    }


def bytes_run(workers: int, payload: float, formula: float) -> Record:
    one = {"formula": formula, "repeated": 3.0}
    for way in ("sent", "received"):
        one |= {f"payload_{way}": payload, f"interface_{way}": payload * 1.055}
    return {"ranks": [one] * workers}


def fake_results(runs: dict[str, list[Record]]) -> dict[str, Record]:
    environment = {"torch": "2.13.0", "cores": 2}
    return {name: {"figures": {"runs": each}, "environment": environment} for name, each in runs.items()}


def test_a_run_faster_than_its_link_is_refused() -> None:
    check_link(experiment("100mbit"), bench_run(exchange_seconds=0.0736))  # exactly the rate
    with pytest.raises(RefusedError) as caught:
        check_link(experiment("100mbit"), bench_run(exchange_seconds=0.0735))
    assert str(caught.value) == (
        "100mbit: the bare exchange moved 920000 bytes in 0.0735 s, 100.1 Mbit/s over a link of 100 Mbit/s, so the "
        "link was not what it is called: this run is refused."
    )
    with pytest.raises(RefusedError, match="no bare exchange"):
        check_link(experiment("100mbit"), {"contenders": {}})
    check_link(experiment("loopback"), bench_run(exchange_seconds=1e-6))  # promises no rate


def test_what_is_refused_or_fails_leaves_no_figure_and_the_rest_goes_on(tmp_path: Path) -> None:
    def measure(one: Experiment, run: int) -> Record:
        if one.name == "1gbit":
            raise RefusedError("too fast")
        if one.name == "tensors":
            raise LinkError("no bridge")
        return bench_run()

    said: list[str] = []
    chosen = [experiment(name) for name in ("tensors", "1gbit", "100mbit")]
    assert not network.run_experiments(chosen, tmp_path, measure, say=said.append)
    assert [path.name for path in tmp_path.iterdir()] == ["100mbit.json"]
    assert "network.py: 1gbit gives no figure: too fast" in said
    assert "network.py: tensors gives no figure: no bridge" in said
    record = read(tmp_path, EXPERIMENTS)["100mbit"]
    assert record["figures"]["runs"] == [bench_run()] * 3
    assert record["made_by"] == "python bench/network.py --only 100mbit"
    assert record["config"]["link"] == "100mbit" and record["config"]["burst_bytes"] == 65536
    assert {"torch", "python", "cpu", "cores", "commit", "tcp"} <= record["environment"].keys()


def test_no_experiment_begins_when_the_time_is_up(tmp_path: Path) -> None:
    said: list[str] = []
    now = iter([0.0, 1.0, 2.0, 61.0, 61.0, 61.0])
    chosen = [experiment("1gbit"), experiment("100mbit")]
    assert not network.run_experiments(
        chosen, tmp_path, lambda one, run: bench_run(), limit_seconds=60, say=said.append, clock=lambda: next(now)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["1gbit.json"]
    assert said[-1] == "Time is up with 1 experiments to go: the same command goes on."


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command with its results in a folder of the test, and runs that cost nothing."""
    (tmp_path / "bench" / "results").mkdir(parents=True)
    monkeypatch.setattr(network, "ROOT", tmp_path)
    monkeypatch.setattr(network, "missing", lambda: None)
    monkeypatch.setattr(network, "measure", lambda one, run: bench_run())
    return lambda *arguments: network.main(arguments)


def test_finished_experiments_are_not_repeated_unless_asked(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--only", "100mbit") == 0
    assert "[1/1] 100mbit" in capsys.readouterr().out
    assert command("--only", "100mbit", "1gbit") == 0
    assert "[1/1] 1gbit" in capsys.readouterr().out
    assert command("--only", "100mbit", "1gbit") == 0
    said = capsys.readouterr().out
    assert "[1/" not in said and "--again repeats it" in said
    assert command("--only", "100mbit", "--again") == 0
    assert "[1/1] 100mbit" in capsys.readouterr().out


def test_a_result_of_another_configuration_is_not_taken(tmp_path: Path) -> None:
    keep(tmp_path, experiment("100mbit"), [bench_run()])
    path = file_of(tmp_path, experiment("100mbit"))
    record = json.loads(path.read_text())
    record["config"]["runs"] += 1
    path.write_text(json.dumps(record))
    assert read(tmp_path, EXPERIMENTS) == {}
    path.write_text("{")
    with pytest.raises(ResultsError, match=r"is damaged .* remove it and measure again"):
        read(tmp_path, EXPERIMENTS)


def test_where_links_are_not_to_be_had_it_is_skipped(
    command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--only", "100mbit") == 0
    monkeypatch.setattr(network, "missing", lambda: "emulated links need root: run the command as root.")
    capsys.readouterr()
    assert command("--only", "1gbit", "100mbit") == network.SKIPPED == 77
    said = capsys.readouterr()
    assert said.err == "skipped: emulated links need root: run the command as root. Not measured: 1gbit.\n"
    assert "| 100 Mbit/s | DDP fp32 / dlion | ≥ 12 | 13.0 |" in said.out  # what was measured before stays
    assert command("--only", "100mbit") == 0  # nothing to do, so nothing was skipped


def test_figures_come_from_the_bench_command_or_from_all_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({"calls": rank}))
    assert network_experiments.read_figures(tmp_path, 2) == {"ranks": [{"calls": 0}, {"calls": 1}]}
    (tmp_path / "bench.json").write_text(json.dumps(bench_run()))
    assert network_experiments.read_figures(tmp_path, 2) == bench_run()


def test_ratios_are_taken_within_a_run() -> None:
    runs = [bench_run(), bench_run(slowdown=3.0), bench_run(ddp_fp32=9.0)]
    rows = network_table.target_rows(fake_results({"100mbit": runs}))
    assert "| 100 Mbit/s | DDP fp32 / dlion | ≥ 12 | 13.0 | 16.3 | yes |" in rows
    assert "| 100 Mbit/s | DDP, fp16 hook / dlion | ≥ 6.5 | 6.50 | 8.12 | yes |" in rows
    assert "| 100 Mbit/s | DDP, PowerSGD rank 2 / dlion | ≥ 1.3 | 1.25 | 1.56 | with overlap |" in rows
    assert "| 100 Mbit/s | dlion, overlap / no communication | ≤ 1.5 |  | 1.60 | **no** |" in rows
    assert "| 10 Mbit/s | DDP fp32 / dlion | ≥ 25 | not measured |  |  |" in rows
    assert len(rows) == 2 + len(TARGETS)


def test_a_missed_target_says_what_bounds_it() -> None:
    results = fake_results({"100mbit": [bench_run(dlion_overlap=None, ddp_fp32=2.0)]})
    assert network_table.missed_lines(results)[1] == (
        "- 100 Mbit/s, DDP fp32 / dlion: not reached. A step of dlion takes 0.200 s (compute 100 ms, wait 92.0 ms, "
        "ballot 4.00 ms, apply 3.00 ms, tally 1.00 ms), of DDP fp32 2.00 s; the bare exchange of 0.920 MB alone takes "
        "92.0 ms (80.0 Mbit/s)."
    )
    # A contender that was not measured is no miss.
    assert "| 100 Mbit/s | dlion, overlap / no communication | ≤ 1.5 | not measured |  |  |" in (
        network_table.target_rows(results)
    )


def test_bytes_are_held_to_the_formula_and_headers_to_theirs() -> None:
    results = fake_results(
        {
            "bytes-majority-4": [bytes_run(4, 1_010.0, 1_000.0)],
            "bytes-majority-8": [bytes_run(8, 1_030.0, 1_000.0)],
            "bytes-majority-16": [bytes_run(16, 1_268.0, 1_250.0)],
        }
    )
    rows = network_table.bytes_rows(results)
    assert "| 4 | majority | 1,000 | 1,010 | 3 | 1.00% | 1,066 | 5.5% | yes |" in rows
    assert "| 8 | majority | 1,000 | 1,030 | 3 | 3.00% | 1,087 | 5.5% | **no** |" in rows
    assert "| 2 | majority | not measured |  |  |  |  |  |  |" in rows
    assert rows[-1] == (
        "Bytes that a worker sends among 16 workers / among 4: 1.255 without headers (target ≤ 1.26, the formula's is "
        "1.25: reached), 1.255 with them."
    )
    results["bytes-majority-4"]["figures"]["runs"][0]["ranks"][0]["interface_sent"] = 2_000.0
    assert "**no**" in network_table.bytes_rows(results)[3]  # headers that no packets explain


def test_tensors() -> None:
    figures: Record = {"calls_1": 2.0, "calls_10": 2.0, "calls_1000": 2.0}
    for n, lion, adam in ((1, 2e-3, 1e-3), (10, 2.1e-3, 1e-3), (1000, 3e-3, 1.2e-3)):
        figures |= {f"dlion_seconds_{n}": lion, f"adamw_seconds_{n}": adam}
    rows = network_table.tensor_rows(fake_results({"tensors": [{"ranks": [figures]}]}))
    assert "| 1,000 | 2.00 | 3.00 | 1.20 |" in rows
    assert rows[-1] == (
        "Calls for 10 and for 1,000 tensors are equal (target: equal). 1,000 tensors / 1 tensor: dlion 1.50 (target ≤ "
        "1.6: reached), fused AdamW 1.20. 999 tensors more take dlion 1.00 ms, fused AdamW 0.200 ms."
    )


def test_the_document_has_a_place_for_every_table(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text(DOCS.read_text(encoding="utf-8"), encoding="utf-8")
    for part, section in network_table.parts({}).items():
        fill(document, "network", part, section)
    assert document.read_text(encoding="utf-8").count("not measured") >= len(TARGETS)
    with pytest.raises(ValueError, match="must hold the marks"):
        fill(document, "network", "nothing", "")
    with pytest.raises(ValueError, match="there is no"):
        fill(tmp_path / "absent.md", "network", "targets", "")


def test_the_documents_tables_are_those_of_its_results(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text(DOCS.read_text(encoding="utf-8"), encoding="utf-8")
    assert network.main(["--table", "--docs", str(document)]) == 0
    assert document.read_text(encoding="utf-8") == DOCS.read_text(encoding="utf-8")


def test_other_results_are_printed_and_never_published(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text("no marks, so that writing here would fail", encoding="utf-8")
    assert command("--only", "100mbit", "--name", "mine", "--docs", str(document)) == 0
    assert "| 100 Mbit/s | DDP fp32 / dlion" in capsys.readouterr().out
