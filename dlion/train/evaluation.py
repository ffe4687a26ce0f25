"""`dlion eval`: the metrics of a finished run, computed again from its saved models."""

from dataclasses import replace
from pathlib import Path

import torch

from dlion.train.config import Settled
from dlion.train.jobs import task_of
from dlion.train.loop import validation
from dlion.train.models import build_model
from dlion.train.runs import Record, RunFolder
from dlion.train.tasks import Task
from dlion.train.weights import load_weights


def print_metrics(path: Path, data: str | None) -> None:
    """Print validation loss and accuracy of the last and of the best model of the run in `path`.

    Each worker's share is evaluated on its own, as in training, so that the numbers are those of summary.json.

    Raises:
        ValueError: there is no finished run, or its data are missing.
    """
    folder = RunFolder.existing(path)
    config, summary = folder.read_config(), folder.read_summary()
    task = task_of(replace(config, data=data or config.data))
    torch.set_num_threads(summary["threads"])
    print(f"{path}: {task.info.note}")
    if task.info.sha256 != summary["data"]["sha256"]:
        print(f"these are not the data of the run ({summary['data']['name']}), so its metrics will differ")
    for label, step, file in (
        ("last", summary["steps"], folder.last_model),
        ("best", summary["best_step"], folder.best_model),
    ):
        metrics = _metrics_of(file, config, task, _device(summary))
        text = "  ".join(f"{name} {value:.6f}" for name, value in metrics.items())
        print(f"{label} (step {step}): {text}")


def _metrics_of(file: Path, config: Settled, task: Task, device: torch.device) -> Record:
    model = build_model(config.model, task, config).to(device)
    load_weights(model, file)
    shares = [
        task.evaluate(model, rank=rank, workers=config.workers, device=device).tolist()
        for rank in range(config.workers)
    ]
    return validation(task, shares)


def _device(summary: Record) -> torch.device:
    trained_on_cuda = summary["device"] == "cuda" and torch.cuda.is_available()
    return torch.device("cuda" if trained_on_cuda else "cpu")
