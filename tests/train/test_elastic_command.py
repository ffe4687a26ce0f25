"""`dlion train --elastic`: workers that are killed and started again, signals, resuming, and a lighthouse elsewhere."""

import json
import os
import re
import select
import shutil
import signal
from pathlib import Path

import pytest
from command import TINY, await_step, await_text, dlion, records, start

from dlion.phases import PHASES

os.environ.setdefault("RUST_LOG", "error")
pytest.importorskip("torchft", reason="elastic workers need torchft: pip install -r requirements/elastic.txt")

from dlion.cli import main
from dlion.elastic.quorum import LighthouseServer
from dlion.train import supervision

pytestmark = pytest.mark.timeout(240)  # half a minute, where nothing else runs
THREE = ("train", "--elastic", "--workers", "3", *TINY[2:], "--name", "run")


def workers_of(launcher: int) -> list[int]:
    """Process ids of the workers: children of the server that forks them, oldest first."""
    return [worker for child in _children(launcher) for worker in _children(child)]


def _children(pid: int) -> list[int]:
    """Oldest first, as the kernel lists them; ids say nothing of that, for they begin anew after the largest."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.processes
@pytest.mark.parametrize(("victim", "stop"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_worker_that_is_killed_comes_back_and_a_stopped_run_goes_on(
    victim: int, stop: signal.Signals, tmp_path: Path
) -> None:
    process = start([*THREE, "--steps", "100000", "--eval-every", "100000"], tmp_path)
    begun = await_text(process, "step 3/")
    pids = workers_of(process.pid)
    os.kill(pids[victim], signal.SIGKILL)
    said = begun + await_text(process, f"worker {victim} joined at step")
    os.killpg(process.pid, stop)  # a launcher's way, and `timeout`'s: to all processes of the command
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + stop, (said, rest, errors)
    assert said.startswith(f"workers 0, 1, 2: processes {', '.join(map(str, pids))}\n")
    assert f"worker {victim} lost at step" in said
    assert re.search(r"stopped after step \d+; go on with: dlion train --resume runs/run\n", rest)
    assert re.fullmatch(rf"worker {victim} was ended by SIGKILL; it is started again, as process \d+\n", errors)
    run = tmp_path / "runs" / "run"
    done = records(run)[-1]["step"]
    assert [record["step"] for record in records(run)] == list(range(done + 1))
    output, _ = dlion(["train", "--resume", "runs/run", "--steps", str(done + 4)], tmp_path)
    assert "3 elastic workers" in output and f"resumed after step {done + 1}\n" in output
    assert [record["step"] for record in records(run)] == list(range(done + 5))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == done + 4 and summary["checkpoints"] >= 2 and summary["checkpoint_seconds"] > 0
    third = json.loads((run / "metrics.jsonl").read_text().splitlines()[2])
    assert all(third[f"{phase}_seconds"] > 0 for phase in PHASES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An elastic run of 6 steps of three workers."""
    folder = tmp_path_factory.mktemp("made")
    dlion([*THREE, "--steps", "6", "--out", "."], folder)
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(made, tmp_path / "run")


def samples_of(run: Path, step: int) -> int:
    notes = json.loads((run / f"checkpoints/step-{step:08d}/manifest.json").read_text())["notes"]
    return int(notes["progress"]["samples"])


@pytest.mark.processes
def test_an_elastic_run_stays_elastic_with_any_number_of_workers(run: Path) -> None:
    output, _ = dlion(["train", "--resume", "run", "--workers", "2", "--steps", "8"], run.parent)
    assert "resumed after step 6, with 2 workers where there were 3: all start from the mean of the saved mom" in output
    assert "2 elastic workers" in output and "elastic = true" in (run / "config.toml").read_text()
    assert [record["step"] for record in records(run)] == list(range(9))
    assert samples_of(run, 8) == 4 * (6 * 3 + 2 * 2)


@pytest.mark.processes
def test_an_elastic_run_goes_on_not_elastic_where_that_is_said_and_back(run: Path) -> None:
    output, _ = dlion(["train", "--resume", "run", "--no-elastic", "--steps", "8"], run.parent)
    assert "resumed after step 6\n" in output and "elastic" not in output
    assert "elastic" not in (run / "config.toml").read_text()
    output, _ = dlion(["train", "--resume", "run", "--elastic", "--steps", "10"], run.parent)
    assert "3 elastic workers" in output and "resumed after step 8\n" in output
    assert "elastic = true" in (run / "config.toml").read_text()
    assert [record["step"] for record in records(run)] == list(range(11))
    assert samples_of(run, 10) == 4 * 3 * 10


@pytest.mark.processes
def test_resuming_an_elastic_run_says_what_cannot_be(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for flags, status, said in (
        ([], 0, "finished after 6 steps: nothing to do"),
        (["--lr", "0.5"], 2, "holds a different run (--lr"),
        (["--simulate", "2"], 2, "--simulate and --elastic contradict each other: leave one out, or give --no-elastic"),
        (["--steps", "5"], 2, "is at step 6 already"),
    ):
        assert main(["train", "--resume", str(run), *flags]) == status
        assert said in "".join(capsys.readouterr())
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.processes
def test_a_worker_that_is_given_up_ends_the_run_only_where_too_few_are_left(tmp_path: Path) -> None:
    process = start([*THREE, "--steps", "100000", "--eval-every", "100000", "--restarts", "0"], tmp_path)
    await_step(process, 3)
    first, second, _ = workers_of(process.pid)
    os.kill(first, signal.SIGKILL)
    await_text(process, "worker 0 lost at step")
    os.kill(second, signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1, (output, errors)
    given_up = "worker {} was ended by SIGKILL and is given up (--restarts 0; more in runs/run/failure.log)"
    assert errors.splitlines() == [
        given_up.format(0),
        "going on without it: workers 1, 2",
        given_up.format(1),
        "dlion: workers 0, 1 failed too often and 1 of 3 are left, where 2 are needed; go on with: dlion train "
        "--resume runs/run",
    ]
    assert (tmp_path / "runs/run/failure.log").read_text().count("was ended by SIGKILL") == 2


@pytest.mark.processes
def test_a_run_is_finished_without_a_worker_that_was_given_up(tmp_path: Path) -> None:
    process = start([*THREE, "--steps", "60", "--eval-every", "100000", "--restarts", "0"], tmp_path)
    await_step(process, 3)
    os.kill(workers_of(process.pid)[1], signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, (output, errors)
    assert "done: validation loss" in output
    assert errors.endswith("dlion: finished without worker 1, given up earlier\n")


@pytest.mark.processes
def test_workers_join_a_lighthouse_elsewhere_and_none_outlives_its_launcher(tmp_path: Path) -> None:
    server = LighthouseServer(2)
    try:
        given = ["train", "--elastic", *TINY, "--steps", "100000", "--name", "run", "--lighthouse", server.address]
        first = start([*given, "--worker", "0"], tmp_path)
        second = start([*given, "--worker", "1"], tmp_path)
        await_step(first, 3)
        descriptors = [os.pidfd_open(worker) for one in (first, second) for worker in workers_of(one.pid)]
        assert len(descriptors) == 2
        for one in (first, second):
            one.kill()
            one.communicate(timeout=30)
        for descriptor in descriptors:
            _await_end(descriptor)
    finally:
        server.close()


@pytest.mark.processes
def test_both_commands_at_one_lighthouse_end_well(tmp_path: Path) -> None:
    """Worker 1 has nothing to write: when it ends, worker 0 may still be at the results."""
    server = LighthouseServer(2)
    try:
        given = ["train", "--elastic", *TINY, "--steps", "4", "--name", "run", "--lighthouse", server.address]
        both = [start([*given, "--worker", str(worker)], tmp_path) for worker in range(2)]
        ended = [one.communicate(timeout=90) for one in both]
        assert [one.returncode for one in both] == [0, 0], ended
    finally:
        server.close()


def _await_end(descriptor: int) -> None:
    """Wait until the process has ended."""
    ready, _, _ = select.select([descriptor], [], [], 20)
    os.close(descriptor)
    assert ready, "a worker outlives its launcher"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lighthouse", "a:1"], "--lighthouse and --worker belong together"),
        (["--lighthouse", "nonsense", "--worker", "0"], "'nonsense' is no address of a lighthouse: give HOST:PORT"),
        (
            ["--lighthouse", "127.0.0.1:1", "--worker", "0", "--patience", "0.1"],
            "nothing answered at http://127.0.0.1:1",
        ),
        (["--min-workers", "4"], "--min-workers 4 must be at most --workers 3"),
        (["--overlap"], "--overlap and --elastic contradict each other"),
    ],
)
def test_mistakes_are_said_in_one_sentence(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*THREE, *flags, "--out", str(tmp_path / "runs")]) == 2
    errors = capsys.readouterr().err
    assert said in errors and errors.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_flags_of_elastic_workers_need_elastic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--min-workers", "2"]) == 2
    assert "--min-workers means nothing without --elastic" in capsys.readouterr().err


def test_the_last_words_of_a_worker_are_no_stack_of_c_plus_plus() -> None:
    written = "Traceback\nValueError: batch 7 is empty.\nframe #24: <unknown function> (in libc.so.6)\n\n"
    assert supervision._last_words(written) == "ValueError: batch 7 is empty" and supervision._last_words("\n") == ""
