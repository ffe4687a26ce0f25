"""`--track` with a real tracker: TensorBoard, whose files can be read again. The others are stood in for elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def run(*arguments: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dlion", "train", *arguments], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_tensorboard_has_what_metrics_jsonl_has(tmp_path: Path) -> None:
    run(*"--workers 2 --steps 4 --batch-size 8 --log-every 2 --name run --track tensorboard".split(), folder=tmp_path)
    run("--resume", "runs/run", "--steps", "6", folder=tmp_path)
    events = EventAccumulator(str(tmp_path / "runs/run/tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    told = {event.step: event.value for event in events.Scalars("loss")}
    assert told.keys() == losses.keys() == {2, 4, 6}
    assert all(abs(told[step] - losses[step]) < 1e-6 * abs(losses[step]) for step in losses)
    wanted = {"lr", "bytes_sent", "bits_per_param_sent", "abstentions", "wait_seconds", "val_accuracy"}
    assert wanted <= set(events.Tags()["scalars"])
