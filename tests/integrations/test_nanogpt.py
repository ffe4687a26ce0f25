"""A training script in the way of nanoGPT, written against torch.optim: five changed lines, and it votes."""

import difflib
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scripts

pytestmark = pytest.mark.timeout(240)  # with frameworks to import, and other work on the machine
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BEFORE, AFTER = HERE / "nanogpt" / "train.py", HERE / "nanogpt" / "train_dlion.py"
SMALL = {
    "eval_interval": 8,
    "eval_iters": 4,
    "warmup_iters": 4,
    "length": 32,
    "layers": 2,
    "width": 64,
    "max_iters": 16,
}
LION = {"learning_rate": 1e-3, "min_lr": 1e-3, "warmup_iters": 0, "beta2": 0.99}  # one rate, however long the run


def changes() -> list[str]:
    texts = [path.read_text().splitlines() for path in (BEFORE, AFTER)]
    return list(difflib.unified_diff(*texts, "train.py", "train.py", n=0, lineterm=""))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of this Python's own library: its bytes."""
    folder = tmp_path_factory.mktemp("data")
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:30]
    tokens = np.frombuffer(b"".join(path.read_bytes() for path in sources), np.uint8).astype(np.uint16)
    tokens[:-20_000].tofile(folder / "train.bin")
    tokens[-20_000:].tofile(folder / "val.bin")
    return folder


def trained(script: Path, data: Path, out: Path, **flags: Any) -> list[float]:
    """The validation losses that two processes of the script print."""
    given = [f"--{name}={value}" for name, value in ({"data": data, "out": out} | SMALL | flags).items()]
    first, second = scripts.run(script, out, *given)
    assert not second.printed and not [text for text in first.warned if "averaged already" in text]
    return [float(line.rpartition(" ")[2]) for line in first.printed if line.startswith("step ")]


def checkpoints(out: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=True) for path in sorted(out.glob("*.pt"))]


def test_five_lines_change_and_the_documentation_shows_them() -> None:
    shown = changes()
    new = [line for line in shown if line.startswith("+") and not line.startswith("+++")]
    gone = [line for line in shown if line.startswith("-") and not line.startswith("---")]
    assert len(new) <= 5 and len(gone) <= len(new)
    page = (ROOT / "docs/integrations/nanogpt.md").read_text()
    assert "```diff\n" + "\n".join(shown) + "\n```" in page


def test_the_script_as_it_was(data: Path, tmp_path: Path) -> None:
    losses = trained(BEFORE, data, tmp_path)
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert len(checkpoints(tmp_path)) == 1


def test_the_changed_script_votes_and_resumes_to_the_bit(data: Path, tmp_path: Path) -> None:
    losses = trained(AFTER, data, tmp_path / "whole", **LION)
    assert len(losses) == 3 and losses[-1] < losses[0]
    first, second = checkpoints(tmp_path / "whole")
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])
    assert not torch.equal(first["optimizer"]["state"][0]["exp_avg"], second["optimizer"]["state"][0]["exp_avg"])

    out = tmp_path / "parts"
    trained(AFTER, data, out, **LION, max_iters=8)
    trained(AFTER, data, out, **LION, init_from="resume", compile="eager")
    for whole, again in zip((first, second), checkpoints(out), strict=True):
        assert whole["step"] == again["step"] == SMALL["max_iters"]
        assert all(torch.equal(whole["model"][name], again["model"][name]) for name in whole["model"])
        for number, state in whole["optimizer"]["state"].items():
            assert torch.equal(state["exp_avg"], again["optimizer"]["state"][number]["exp_avg"])
