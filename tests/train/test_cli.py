"""Guards what a user types and reads: help without torch, one sentence for a mistake, a whole run, `dlion eval`."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command import TINY, dlion, environment, records

MISTAKES = {
    "unknown method": (["--method", "dlion-mavv"], "did you mean dlion-mavo"),
    "unknown task": (["--task", "fashion"], "fashion-mnist"),
    "unknown model": (["--model", "convv"], "conv"),
    "model of another task": (["--model", "gpt"], "gpt"),
    "missing data": (["--data", "nowhere"], "nowhere"),
    "lr 0": (["--lr", "0"], "--lr must be"),
    "lr negative": (["--lr", "-1"], "--lr must be"),
    "lr NaN": (["--lr", "nan"], "--lr must be"),
    "lr is a word": (["--lr", "fast"], "--lr"),
    "beta 1": (["--betas", "0.9", "1"], "--betas must be"),
    "beta negative": (["--betas", "-0.1", "0.9"], "--betas must be"),
    "one beta": (["--betas", "0.9"], "--betas"),
    "no workers": (["--workers", "0"], "--workers must be at least 1"),
    "batch size 0": (["--batch-size", "0"], "--batch-size must be at least 1"),
    "accumulate 0": (["--accumulate", "0"], "--accumulate must be at least 1"),
    "steps 0": (["--steps", "0"], "--steps must be at least 1"),
    "steps and epochs": (["--steps", "5", "--epochs", "1"], "contradict each other"),
    "warm-up longer than the run": (["--steps", "5", "--warmup-steps", "5"], "smaller than --steps"),
    "clip norm 0": (["--clip-norm", "0"], "--clip-norm must be"),
    "clipping after voting": (["--overlap", "--clip-norm", "1"], "contradict each other"),
    "weight decay negative": (["--weight-decay", "-0.1"], "--weight-decay must be"),
    "seed negative": (["--seed", "-1"], "--seed must be"),
    "precision": (["--precision", "fp8"], "bf16"),
    "unknown flag": (["--learning-rate", "1"], "--learning-rate"),
    "name outside": (["--name", "../x"], "--name must be"),
    "name of two lines": (["--name", "a\nb"], "--name must be"),
    "name that is no text": (["--name", "a\udcff"], "--name must be"),
    "data of nobody": (["--data", "~no-such-user/x"], "home folder"),
    "text of nobody": (["--task", "text", "--data", "~no-such-user/x"], "home folder"),
    "images of nobody": (["--task", "cifar10", "--data", "~no-such-user/x"], "home folder"),
    "data that is no text": (["--data", "a\udcff"], "UTF-8"),
    "no such config": (["--config", "no.toml"], "no.toml cannot be read"),
    "unknown key": (["--config", "unknown.toml"], "did you mean batch-size"),
    "broken TOML": (["--config", "broken.toml"], "not valid TOML"),
    "workers and simulate": (["--workers", "2", "--simulate", "2"], "contradict each other"),
    "nobody simulated": (["--simulate", "0"], "--simulate must be at least 1"),
    "sizes for other workers": (["--batch-sizes", "2", "3", "--workers", "3"], "2 sizes for 3 workers"),
    "size 0": (["--batch-sizes", "2", "0", "--workers", "2"], "--batch-sizes must be"),
    "no threads": (["--threads", "0"], "--threads must be at least 1"),
    "ties of a mean": (["--method", "g-lion", "--ties", "rotate"], "which has no majority"),
    "zeros of a mean": (["--method", "g-adamw", "--zeros", "exact"], "whose ballots are no votes"),
    "no move with one bit": (["--ties", "zero"], "zeros='exact'"),
    "fixed ties of real workers": (["--ties", "fixed"], "only --simulate has"),
    "a setting of others": (["--keep", "0.1"], "keep=0.1 is no setting of method='dlion-mavo'"),
    "a momentum of others": (["--simulate", "2", "--momentum", "0.9"], "momentum=0.9 is no setting"),
    "nothing to overlap": (["--overlap", "--simulate", "2"], "contradict each other"),
    "no start": (["--init-from", "nowhere"], "nowhere is missing"),
    "a start that is no text": (["--init-from", "a\udcff"], "UTF-8"),
    "resume nothing": (["--resume", "runs/none"], "holds no run"),
    "resume and config": (["--resume", "a", "--config", "b"], "contradict each other"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_sentence_and_leaves_nothing(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dlion.cli import main

    arguments, expected = MISTAKES[mistake]
    (tmp_path / "unknown.toml").write_text("batchsize = 4\n")
    (tmp_path / "broken.toml").write_text("steps = = 4\n")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1 and said.err.startswith("dlion: ")
    assert expected in said.err
    assert sorted(tmp_path.rglob("*")) == before


def test_more_workers_than_gpus_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    from dlion.cli import main

    assert main(["train", "--device", "cuda", "--workers", "4096"]) == 2
    assert "needs one GPU for each worker" in capsys.readouterr().err


@pytest.mark.processes
def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys\nfrom dlion.cli import main\n"
        "assert main(['--help']) == main(['train', '--help']) == main(['--version']) == main(['eval', '--help']) == 0\n"
        "assert main(['bench', '--help']) == main(['few-shot', '--help']) == main(['recipes']) == 0\n"
        "print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--batch-size" in done.stdout


@pytest.mark.processes
def test_without_the_extra_one_sentence_says_what_to_install() -> None:
    code = "import sys\nsys.modules['cyclopts'] = None\nimport dlion.cli"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and 'pip install "dlion[train]"' in done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A finished run of 6 steps: its folder, what was said, and what went to standard error."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "my.toml").write_text('steps = 9\nlr = 2e-3\nbetas = [0.9, 0.98]\nmethod = "dlion-avg"\neval-every = 4\n')
    output, errors = dlion(["train", *TINY, "--config", "my.toml", "--steps", "6"], folder)
    return folder / "runs" / "fashion-mnist-dlion-avg-n2-s0", output, errors


@pytest.mark.processes
def test_a_run_leaves_what_it_promises(finished: tuple[Path, str, str]) -> None:
    run, _, _ = finished
    promised = ["checkpoints", "config.toml", "metrics.jsonl", "model-last.safetensors", "model.safetensors"]
    assert sorted(path.name for path in run.iterdir()) == [*promised, "report.html", "summary.json"]
    summary = json.loads((run / "summary.json").read_text())
    promised_keys = """method workers params steps seed data val_loss val_accuracy bits_per_param_sent
        bits_per_param_received ratio seconds seconds_total samples_per_s kernels versions threads lr""".split()
    assert not set(promised_keys) - set(summary)
    assert summary["method"] == "dlion-avg" and summary["steps"] == 6 and summary["workers"] == 2
    assert 0.0 <= summary["val_accuracy"] <= 1.0
    assert summary["params"] >= 100_000
    assert len(summary["data"]["sha256"]) == 64
    assert 0.0 < summary["seconds"] < summary["seconds_total"]
    lines = records(run)
    assert [line["step"] for line in lines] == list(range(7))
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 4, 6]
    assert lines[-1]["val_loss"] == summary["val_loss"]


@pytest.mark.processes
def test_flags_beat_the_file_and_the_file_beats_defaults(finished: tuple[Path, str, str]) -> None:
    config = tomllib.loads((finished[0] / "config.toml").read_text())
    assert (config["steps"], config["lr"], config["betas"], config["batch-size"]) == (6, 2e-3, [0.9, 0.98], 4)
    assert "weight-decay" in config and "epochs" not in config


@pytest.mark.processes
def test_plain_output_has_no_control_characters(finished: tuple[Path, str, str]) -> None:
    _, output, errors = finished
    assert errors == ""
    assert all(character.isprintable() or character == "\n" for character in output)
    assert sum(line.startswith("step ") for line in output.splitlines()) == 7
    assert "Fashion-MNIST" in output and "kernels" in output and "report.html" in output


@pytest.mark.processes
def test_eval_prints_the_stored_metrics(finished: tuple[Path, str, str]) -> None:
    run, _, _ = finished
    summary = json.loads((run / "summary.json").read_text())
    output, errors = dlion(["eval", str(run)], run)
    assert errors == ""
    for label, prefix in (("last", ""), ("best", "best_")):
        line = next(line for line in output.splitlines() if line.startswith(label))
        loss, accuracy = summary[f"{prefix}val_loss"], summary[f"{prefix}val_accuracy"]
        assert line.endswith(f": val_loss {loss:.6f}  val_accuracy {accuracy:.6f}")


@pytest.mark.processes
def test_a_name_that_the_terminal_cannot_show_is_no_reason_to_fail(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "dlion", "train", *TINY, "--steps", "1", "--out", ".", "--name", "\xfcber"]
    ascii_only = environment() | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(arguments, cwd=tmp_path, env=ascii_only, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "run folder: \\xfcber" in done.stdout


@pytest.mark.processes
def test_eval_into_a_closed_pipe_ends_quietly(finished: tuple[Path, str, str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "dlion", "eval", str(finished[0])]
    done = subprocess.run(command, env=environment(), stdout=writing, stderr=subprocess.PIPE, timeout=100)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(("rank", "size"), [("3", "2"), ("x", "1"), ("0", "many"), ("0", "0")])
def test_a_launcher_that_counts_wrongly_is_told(
    rank: str, size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dlion.cli import main

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    assert main(["train"]) == 2
    assert f"RANK={rank} and WORLD_SIZE={size}" in capsys.readouterr().err


def test_eval_of_nothing_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dlion.cli import main

    assert main(["eval", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.processes
def test_the_configuration_of_a_run_repeats_it(finished: tuple[Path, str, str]) -> None:
    run, _, _ = finished
    dlion(["train", "--config", "runs/fashion-mnist-dlion-avg-n2-s0/config.toml"], run.parent.parent)
    again = run.with_name(run.name + "-2")
    assert records(again) == records(run)
    assert (again / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    assert (again / "config.toml").read_bytes() == (run / "config.toml").read_bytes()
