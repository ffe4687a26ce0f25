"""The plan's bytes are those that the optimizer counts, to the byte: shards, padding, headers and buckets."""

from typing import Any

import pytest
import torch
from world import succeed, world

import dlion
from dlion.methods import METHODS as METHODS_OF_DLION
from dlion.train.plan.cluster import GLOO, Cluster, Link
from dlion.train.plan.methods import METHODS, Scene
from dlion.train.plan.rates import Rates
from dlion.train.plan.sizes import Shape, Sizes
from dlion.train.plan.votes import Topology
from dlion.train.plan.work import Compute, Step, step_of

ODD: tuple[Shape, ...] = ((3, 7), (1,), (65,), (130, 3), (64,), ())
LARGE: tuple[Shape, ...] = ((1100, 1000), (999,), (300, 1001))  # two buckets with overlap


def counted(size: int, shapes: tuple[Shape, ...], **options: Any) -> tuple[float, float]:
    """Bytes and calls of a step: the most that a worker sent, and the calls of each."""

    def work(rank: int, group: Any) -> tuple[int, int]:
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = dlion.Distributed(params, lr=1e-3, process_group=group, **options)
        for step in range(2):
            for param in params:
                param.grad = torch.full_like(param, rank + step - 0.5)
            optimizer.step()
        return optimizer.stats.bytes_sent // 2, optimizer.stats.calls // 2

    sent, calls = zip(*succeed(world(size, work)), strict=True)
    return max(sent), max(calls)


def planned(size: int, shapes: tuple[Shape, ...], method: str, topology: Topology) -> Step:
    link = Link(1e-5, 1e9)
    scene = Scene(Sizes.of("these", shapes), size, Rates(), topology)
    return step_of(METHODS[method](scene), Cluster(size, 1, link, link, 0.0, GLOO), Compute(0.1, 0.1))


@pytest.mark.wide(5)
@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg"])
@pytest.mark.parametrize("topology", ["auto", "sharded", "replicated", "server"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_bytes_of_topologies(size: int, topology: Topology, method: str) -> None:
    step = planned(size, ODD, method, topology)
    assert (step.sent, step.calls) == counted(size, ODD, method=method, topology=topology)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dlion-mavo", {}),
        ("dlion-mavo, overlap", {"overlap": True}),
        ("dlion-avg, overlap", {"method": "dlion-avg", "overlap": True}),
        ("dlion-mavo, exact zeros", {"zeros": "exact"}),
    ],
)
def test_bytes_of_buckets(size: int, method: str, options: dict[str, Any]) -> None:
    step = planned(size, LARGE, method, "auto")
    assert (step.sent, step.calls) == counted(size, LARGE, **options)


@pytest.mark.wide(5)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", METHODS_OF_DLION)
def test_bytes_of_methods(method: str, size: int) -> None:
    for shapes in (
        ODD,
        ((70, 60), (30, 2000), (4,)),
    ):  # those of the second are worth two factors, or have many entries
        step = planned(size, shapes, method, "auto")
        settings = {"keep": 0.04} if method in ("graddrop", "dgc") else {}
        assert (step.sent, step.calls) == counted(size, shapes, method=method, **settings)
