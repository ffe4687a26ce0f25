"""The examples of Accelerate, FSDP2, Lightning and Trainer run as they stand, and go on from their checkpoints."""

import re
from pathlib import Path

import pytest

import scripts

pytestmark = pytest.mark.timeout(240)  # with frameworks to import, and other work on the machine
LIGHTNING = ("torch._dynamo", "dlion.integrations.lightning")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def bits_sent(line: str) -> float:
    return float(re.search(r"([\d.]+) bits", line)[1])


def test_accelerate(tmp_path: Path) -> None:
    script = EXAMPLES / "with_accelerate.py"
    assert len(script.read_text().splitlines()) < 60
    first, second = scripts.run(script, tmp_path, "--epochs=2", "--every=10")
    assert len(first.printed) == 2 and not second.printed
    assert 1 < bits_sent(first.printed[-1]) < 1.05
    again, _ = scripts.run(script, tmp_path, "--epochs=1", "--every=10", "--resume")
    accuracies = [float(line.split()[2].rstrip("%,")) for line in first.printed + again.printed]
    assert accuracies[0] < accuracies[1] < accuracies[2] and accuracies[2] > 60
    assert not [text for said in (first, second, again) for text in said.warned if "dlion" in text]


def test_fsdp2(tmp_path: Path) -> None:
    script = EXAMPLES / "with_fsdp2.py"
    assert len(script.read_text().splitlines()) < 60
    first, again = (
        scripts.run(script, tmp_path, f"--steps={steps}", size=4, preload=("torch.distributed.fsdp",))
        for steps in (20, 60)
    )
    said = [[each.printed[-1] for each in run] for run in (first, again)]
    assert all(0.9 < bits_sent(line) < 1.1 for line in [*said[0], *said[1]])
    before, after = (float(lines[0].split(": ")[1].split("%")[0]) for lines in said)
    assert 20 < before < after
    assert [path.name for path in sorted((tmp_path / "fsdp2-checkpoints").iterdir())] == ["20", "60"]
    assert not [text for run in (first, again) for each in run for text in each.warned if "dlion" in text]


def test_trainer(tmp_path: Path) -> None:
    script = EXAMPLES / "with_trainer.py"
    assert len(script.read_text().splitlines()) < 60
    first, second = scripts.run(script, tmp_path, "--steps=4", "--width=32")
    assert "parameters vote" in first.printed[-1] and 1 < bits_sent(first.printed[-1]) < 1.1
    again, _ = scripts.run(script, tmp_path, "--steps=6", "--width=32", "--resume")
    assert "parameters vote" in again.printed[-1]
    assert (tmp_path / "trainer-out" / "checkpoint-6" / "dlion").is_dir()
    assert not [text for said in (first, second, again) for text in said.warned if "dlion" in text]


def test_lightning(tmp_path: Path) -> None:
    script = EXAMPLES / "with_lightning.py"
    assert len(script.read_text().splitlines()) < 60
    first, _ = scripts.run(script, tmp_path, "--epochs=2", "--every=10", preload=LIGHTNING)
    kept = "lightning_logs/version_0/checkpoints/epoch=1-step=20.ckpt"
    again, _ = scripts.run(script, tmp_path, "--epochs=3", "--every=10", "--resume", kept, preload=LIGHTNING)
    assert 1 < bits_sent(first.printed[-1]) < 1.05
    before, after = (float(said.printed[-1].split("%")[0]) for said in (first, again))
    assert 40 < before < after
    assert not [text for said in (first, again) for text in said.warned if "dlion" in text]
