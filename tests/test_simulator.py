"""A simulation and as many real workers over Gloo: the same parameters, states and bytes, to the bit."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from odd_tensors import make_model, same, set_gradients, tensors_of
from torch import nn
from world import succeed, world

from dlion import Distributed
from dlion.methods import METHODS
from dlion.simulate import Simulation

STEPS = 4
SMALL_BUCKETS = {"bucket_bytes": 40}  # 320 elements of votes, 3 buckets: tensors are cut
IN_NUMBERS = {"bucket_bytes": 40 * 32}  # as many elements of full precision

# name -> options of the optimizer; every method meets all that it has at some N
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small buckets": SMALL_BUCKETS,
    "alternate": {"ties": "alternate", **SMALL_BUCKETS},
    "exact zeros": {"zeros": "exact", **SMALL_BUCKETS},
    "no move at ties": {"zeros": "exact", "ties": "zero"},
    "exact, alternate": {"zeros": "exact", "ties": "alternate", "topology": "replicated"},
    "server": {"topology": "server", **SMALL_BUCKETS},
    "sharded": {"topology": "sharded", **SMALL_BUCKETS},
    "skip": {"nonfinite": "skip", **SMALL_BUCKETS},
    "narrow momentum": {"momentum_dtype": torch.bfloat16, "rounding": "stochastic"},
    "reference kernels": {"kernels": "reference", **SMALL_BUCKETS},
}


def allowed(method: str, options: dict[str, Any]) -> bool:
    """Whether the method has all these options."""
    known = METHODS[method].options | {"nonfinite", "kernels", "topology"}
    return known >= options.keys() and options.get("topology", "auto") in METHODS[method].topologies


def rates(step: int) -> float:
    return 0.01 / (step + 1)


def told(model: nn.Module, optimizer: Distributed, state_dict: dict[str, Any], stats: Any) -> dict[str, Any]:
    counted = asdict(stats)
    return {
        "params": [param.detach().clone() for param in model.parameters()],
        "state": tensors_of(state_dict),
        "t": optimizer.param_groups[0]["t"],
        "stats": {name: value for name, value in counted.items() if not name.startswith("check_")},
    }


def real(method: str, options: dict[str, Any]) -> Callable[[int, Any], dict[str, Any]]:
    def work(rank: int, group: Any) -> dict[str, Any]:
        model = make_model()
        optimizer = Distributed(model.named_parameters(), method, weight_decay=0.1, process_group=group, **options)
        for step in range(STEPS):
            set_gradients(model, rank, step)
            optimizer.param_groups[0]["lr"] = rates(step)
            optimizer.step()
        return told(model, optimizer, optimizer.state_dict(), optimizer.stats)

    return work


def simulated(method: str, workers: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    model = make_model()
    simulation = Simulation(model, method, workers=workers, weight_decay=0.1, **options)
    for step in range(STEPS):
        simulation.param_groups[0]["lr"] = rates(step)
        for rank in range(workers):
            with simulation.worker(rank):
                set_gradients(model, rank, step)
        simulation.step()
    return [told(model, simulation, simulation.state_dict(rank), simulation.stats_of(rank)) for rank in range(workers)]


def assert_equal(mine: list[dict[str, Any]], theirs: list[dict[str, Any]], what: str) -> None:
    for rank, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        assert here["t"] == there["t"], what
        assert here["stats"] == there["stats"], (what, rank)
        for part in ("params", "state"):
            assert len(here[part]) == len(there[part])
            assert all(map(same, here[part], there[part])), (what, part, rank)


@pytest.mark.parametrize("workers", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 9))])
def test_simulated_and_real_workers_are_bitwise_equal(workers: int) -> None:
    cases = [
        (method, name, options | IN_NUMBERS if method.startswith("g-") and "bucket_bytes" in options else options)
        for k, method in enumerate(METHODS)
        for j, (name, options) in enumerate(VARIANTS.items())
        if allowed(method, options) and (name == "plain" or (j + k + workers) % 4 == 0)
    ]
    works = [real(method, options) for method, _, options in cases]
    ranks = succeed(world(workers, lambda rank, group: [work(rank, group) for work in works]))
    moved = make_model().state_dict().values()
    for number, (method, name, options) in enumerate(cases):
        mine = simulated(method, workers, options)
        assert_equal(mine, [told[number] for told in ranks], f"{method}, {name}, {workers} workers")
        assert not all(map(torch.equal, mine[0]["params"], moved))
