"""A study with made-up results, as `dlion compare` would have recorded them."""

from collections.abc import Callable
from typing import Any

from dlion.train.compare.cells import Cell, first_stage, second_stage
from dlion.train.compare.choose import choose
from dlion.train.compare.study import Study, study_from

Record = dict[str, Any]
VERSIONS = {"dlion": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu"}

TOLD: dict[str, Any] = {
    "title": "Votes <and> sums",
    "notes": ["Images shrunk from 32 to 16 pixels."],
    "metric": "best_val_accuracy",
    "train": {"task": "cifar10", "steps": 40},
    "vary": {
        "method": ["dlion-mavo", "g-lion", "terngrad"],
        "workers": [4, 16],
        "seed": [42, 52, 62],
        "dlion-mavo": {"workers": [4, 8, 16]},
    },
    "grid": {"lr": [0.001, 0.01], "weight-decay": [0.1], "terngrad": {"lr": [0.1], "keep": [0.04]}},
    "tune": {"workers": 4, "seed": 1},
}


def told(**changes: Any) -> dict[str, Any]:
    return {**TOLD, **changes}


def quality(cell: Cell) -> float | None:
    """An accuracy that follows from the cell alone; terngrad with seed 52 diverges."""
    if cell.variant == "terngrad" and cell.seed == 52:
        return None
    base = {"dlion-mavo": 0.6, "g-lion": 0.58, "terngrad": 0.3}[cell.variant]
    bonus = 0.02 if cell.flags["lr"] == 0.001 else 0.0
    return base + bonus - 0.001 * cell.workers + 0.0005 * (int(cell.seed) % 5)


def recorded(cell: Cell, accuracy: float | None, **changes: Any) -> Record:
    """The line of a cell."""
    bits = 1.5 if cell.variant.startswith("dlion") else 48.0
    steps = [0, 20, 40]
    reached = [0.1, None if accuracy is None else 0.8 * accuracy, accuracy]
    losses = [2.3, None if accuracy is None else 1.5, None if accuracy is None else 1.0 - accuracy / 2]
    record: Record = {
        "flags": cell.flags,
        "config": {"log-every": 10, "betas": [0.9, 0.99], **cell.flags},
        "diverged": accuracy is None,
        "val_accuracy": accuracy,
        "best_val_accuracy": accuracy if accuracy is not None else 0.1,
        "val_loss": losses[-1],
        "best_val_loss": losses[-1] if accuracy is not None else 2.3,
        "best_step": 40,
        "steps": 40,
        "epoch_steps": 20,
        "workers": cell.workers,
        "params": 1000,
        "bits_per_param_sent": bits,
        "bits_per_param_received": bits,
        "ratio": 48 / bits,
        "abstentions": 0,
        "bytes_sent": int(bits * 5000),
        "bytes_received": int(bits * 5000),
        "seconds": 2.0,
        "device": "cpu",
        "threads": 1,
        "kernels": "native",
        "simulated": False,
        "versions": VERSIONS,
        "data": {"name": "CIFAR-10", "sha256": "ab" * 32},
        "curve": {
            "step": steps,
            "val_accuracy": reached,
            "val_loss": losses,
            "bytes_sent": [int(bits * 125 * step) for step in steps],
        },
        "study": "0" * 16,
    }
    return record | changes


def run_all(study: Study, value: Callable[[Cell], float | None] = quality) -> dict[str, Record]:
    """What all cells of both stages would have given."""
    records = {cell.key: recorded(cell, value(cell)) for cell in first_stage(study)}
    if study.tune is not None:
        points = {key: choice.point for key, choice in choose(study, records).items()}
        records |= {cell.key: recorded(cell, value(cell)) for cell in second_stage(study, points)}
    return records


STUDY = study_from(TOLD)
