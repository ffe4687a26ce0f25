"""Checkpoints of all workers. Their index is a pickle, so no input here is one whose sums fit: that would be malice."""

from collections.abc import Iterator
from pathlib import Path

import torch
from fuzz import Parser
from fuzz_files import written
from mutations import spoiled_json
from torch import nn

import dlion
from dlion.checkpoint import load, save, verify
from dlion.manifest import NAME


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
            yield Parser("manifest of a checkpoint", [good], written(place / name, read), 8, spoiled_json)
        else:
            yield Parser(f"{name} of a checkpoint", [good], written(place / name, read), 2)


def _names(folder: Path, model: nn.Module, simulation: dlion.Simulation) -> list[str]:
    save(folder / "first", model, simulation)
    return sorted(path.name for path in (folder / "first").iterdir())
