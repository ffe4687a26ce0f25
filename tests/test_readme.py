"""Guards the README and the pages on the command: Python runs as written; commands, flags and make targets exist."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import result_tables

from dlion.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SIMULATING = (ROOT / "docs/simulator.md").read_text(encoding="utf-8")
CHECKPOINTS = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TEXTS = (README, GUIDE, *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))))
RUN = "runs/fashion-mnist-dlion-mavo-n4-s0"


def python_blocks(text: str) -> tuple[list[str], list[str]]:
    """The python blocks: those marked for torchrun, and the others."""
    found = [block for block in pages.blocks(text) if block.language == "python"]
    marked = [block.code for block in found if block.mark == "torchrun"]
    return marked, [block.code for block in found if block.mark != "torchrun"]


def dlion_commands(text: str) -> list[str]:
    """The arguments of every `dlion ...` with some: lines of their own, inside backticks, and after `-m`."""
    text = text.replace("\\\n", "")
    lines = re.findall(r"^ {4}(?:torchrun .* -m )?dlion (.+)$", text, re.MULTILINE)
    return lines + re.findall(r"`dlion ([a-z-]+ [^`]+)`", text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short run under the name that the documents use."""
    folder = tmp_path_factory.mktemp("readme")
    flags = ["--workers", "1", "--steps", "1", "--batch-size", "8", "--name", Path(RUN).name]
    run([sys.executable, "-m", "dlion", "train", *flags], folder)
    return folder


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def parse(arguments: str) -> None:
    app.parse_args(shlex.split(arguments, comments=True), exit_on_error=False, print_error=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The README's example of the optimizer, as a file."""
    code = python_blocks(README)[0][0]
    assert len(code.strip().splitlines()) <= 16
    path = tmp_path / "script.py"
    path.write_text(code)
    return path


@pytest.mark.processes
def test_the_optimizer_example_runs_alone(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What torchrun would set for a single worker; port 0 is any free one.
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    assert "0.00 bits" in run([sys.executable, "-W", "error", script.name], script.parent)


LAUNCHER = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.processes
def test_the_loop_of_the_page_on_checkpoints_goes_on_where_it_was(tmp_path: Path) -> None:
    code = python_blocks(CHECKPOINTS)[1][0]
    told = "print(f'from {step}\\n', end='')"  # in one write: both workers have the same output
    (tmp_path / "script.py").write_text(code.replace("while step < 200", f"{told}\nwhile step < 200"))
    assert run([*LAUNCHER, "script.py"], tmp_path).count("from 0\n") == 2
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["150", "200"]
    shutil.rmtree(tmp_path / "checkpoints/200")
    assert run([*LAUNCHER, "script.py"], tmp_path).count("from 150\n") == 2


@pytest.mark.processes
def test_the_optimizer_example_runs_under_torchrun(script: Path) -> None:
    printed = run([*LAUNCHER, script.name], script.parent)
    assert len(re.findall(r"1\.0\d bits .* ratio 3[12]\n", printed)) == 1, printed


@pytest.mark.processes
def test_a_trained_model_is_loaded_as_written(trained: Path) -> None:
    (code,) = python_blocks((ROOT / "docs/command.md").read_text(encoding="utf-8"))[1]
    run([sys.executable, "-W", "error", "-c", code], trained)


@pytest.mark.processes
def test_every_command_parses(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [command for text in TEXTS for command in dlion_commands(text)]
    assert any(RUN in command for command in commands) and len(commands) > 6
    monkeypatch.chdir(trained)
    for command in commands:
        parse(command)


def test_a_flag_that_does_not_exist_is_found() -> None:
    (command,) = dlion_commands("    dlion train --no-such-flag 3\n")
    with pytest.raises(Exception, match="no-such-flag"):
        parse(command)


def test_tables_of_comparisons_are_those_of_their_folders() -> None:
    documents = [README, *(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))]
    names = [name for text in documents for name in result_tables.MARK.findall(text)]
    assert {"quality-fashion-mnist", "quality-text"} <= set(names)
    for text in documents:
        for name in result_tables.MARK.findall(text):
            assert f"<!-- compare:begin {name} -->\n{result_tables.table_of(name)}\n<!-- compare:end" in text


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = r"^(?: {4})make ([a-z-]+)|`make ([a-z-]+)|^make ([a-z-]+)"
    files = (README, GUIDE, (ROOT / ".ci/run").read_text())
    named = {"".join(match) for text in files for match in re.findall(commands, text, re.MULTILINE)}
    assert named == {"train", "test", "test-all", "check", "sanitize", "wheel", "smoke", "bench", "docs", "clean"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for variable in re.findall(r"\b([A-Z]+)=", README):
        assert re.search(rf"^{variable} \?=", makefile, re.MULTILINE) or variable == "N"


def test_the_versions_agree() -> None:
    """The pinned torch of the Makefile is one that the package accepts, and what is pinned is pinned exactly."""
    assert re.search(r"^TORCH \?= torch==2\.13\.0$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        pins = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][^ ]*", pin) for pin in pins), file.name
        apart = ("torch==", "dlion==", "nvidia") + (("triton",) if file.name != "triton.txt" else ())  # 1 GB
        assert not any(pin.lower().startswith(apart) for pin in pins), file.name
        assert pins == sorted(pins, key=lambda pin: pin.partition("==")[0].lower()), file.name


def test_the_example_of_the_simulator_runs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = python_blocks(SIMULATING)[1]
    exec(example, {})
    loss, bits, *_ = capsys.readouterr().out.replace(",", "").split()
    assert float(loss) < 0.1  # 1.3 at the start
    assert float(bits) > 1
