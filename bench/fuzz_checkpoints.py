"""Checkpoints of all workers. Their index is a pickle, so no input here is one whose sums fit: that would be malice."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from fuzz import Parser
from fuzz_files import written
from mutations import spoiled_json
from torch import nn

import dlion
from dlion.checkpoint import load, save, verify
from dlion.checkpoint.manifest import NAME
from dlion.train import checkpoints as runs
from dlion.train.config import TrainConfig, settle, to_flags
from dlion.train.data import DataInfo
from dlion.train.runs import RunFolder


def checkpoints(folder: Path) -> Iterator[Parser]:
    """The manifest, and every kind of file, of a checkpoint of two workers."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    simulation = dlion.Simulation(model, workers=2, lr=0.01)
    for rank in range(2):
        with simulation.worker(rank):
            model(torch.randn(5, 4)).sum().backward()
    simulation.step()
    for name in _names(folder, model, simulation):
        place = folder / f"checkpoint-{name}"
        save(place, model, simulation, extra={"step": 1}, notes={"run": "x", "step": 1})

        def read(place: Path = place) -> None:
            verify(place)
            load(place, model, simulation)

        good = (place / name).read_bytes()
        if name == NAME:
            yield Parser("manifest of a checkpoint", [good], written(place / name, read), 4, spoiled_json)
        else:
            yield Parser(f"{name} of a checkpoint", [good], written(place / name, read), 1)
    yield from of_runs(folder)


def of_runs(folder: Path) -> Iterator[Parser]:
    """What a run finds when it goes on."""
    run = RunFolder(folder / "resumed")
    run.checkpoints.mkdir(parents=True)
    config = settle(TrainConfig(), model="conv", workers=1, steps_per_epoch=1)
    run.write_config(config)
    data = DataInfo("x", "ab" * 32, "x", 10, 10)
    about = {"run": to_flags(config), "data": {"name": "x", "sha256": data.sha256}}
    for flag in runs.MAY_CHANGE:
        about["run"].pop(flag, None)
    model = nn.Linear(2, 2)
    simulation = dlion.Simulation(model, workers=1, lr=0.01)
    place = run.checkpoints / "step-00000001"
    save(place, model, simulation, notes={**about, "progress": asdict(runs.Progress(step=1))})

    def resume() -> None:
        runs.latest(run, config, data)

    good = (place / NAME).read_bytes()
    yield Parser("manifest of a run", [good], written(place / NAME, resume), 5, spoiled_json)


def _names(folder: Path, model: nn.Module, simulation: dlion.Simulation) -> list[str]:
    save(folder / "first", model, simulation)
    return sorted(path.name for path in (folder / "first").iterdir())
