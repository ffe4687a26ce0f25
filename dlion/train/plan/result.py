"""From a question to the contents of plan.json."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from dlion.train.plan.break_even import GRID, break_even
from dlion.train.plan.cluster import Cluster
from dlion.train.plan.methods import ALONE, BASE, METHODS, Scene
from dlion.train.plan.settings import GBIT, PlanConfig
from dlion.train.plan.sizes import Sizes
from dlion.train.plan.votes import Topology
from dlion.train.plan.work import Compute, Step, Work, step_of

Result = dict[str, Any]

COMPARED = ("dlion-mavo", "dlion-avg")  # under each topology
TOPOLOGIES: tuple[Topology, ...] = ("sharded", "replicated", "server")
NUMBERS = (10, 100, 1_000, 10_000, 100_000)
MOST_COUNTED = 2**16 - 1  # voters that a verdict's header can name
SIMILAR = 0.02  # between bytes and formula


def result_of(config: PlanConfig, sizes: Sizes) -> Result:
    """Everything that the table, the page and plan.json say."""
    cluster, compute, scene = config.cluster(), config.times(), config.scene(sizes)
    steps = {name: _asked(name, scene, cluster, compute) for name in METHODS}
    base = steps[BASE]["seconds"]
    for name, found in steps.items():
        found["break_even"] = (
            None
            if name in (ALONE, BASE) or cluster.workers == 1
            else _even(METHODS[name](scene), scene, cluster, compute)
        )
    topologies = {
        f"{name}, {topology}": _asked(name, replace(scene, topology=topology), cluster, compute)
        for name in COMPARED
        for topology in TOPOLOGIES
    }
    for found in [*steps.values(), *topologies.values()]:
        found["to_base"] = base / found["seconds"]
    return {
        "settings": config.to_json(),
        "rates": asdict(scene.rates),
        "model": {"name": sizes.name, "parameters": sizes.parameters, "tensors": sizes.tensors},
        "nodes": cluster.nodes,
        "methods": steps,
        "topologies": topologies,
        "bandwidths": _bandwidths(scene, cluster, compute),
        "numbers": _numbers(scene, cluster, compute),
        "left_out": left_out(),
    }


def left_out() -> list[str]:
    """What the model does not know."""
    return [
        "Waiting for slower workers: --compute is taken as the slowest worker's, in every step.",
        "The cores that the network itself takes: where workers have none to spare, overlap hides less than this says, "
        "and calls slow the computation.",
        "Congestion and loss: all-to-all calls of many workers meet at one port, which on slow links with short queues "
        "loses packets. Protocol headers: TCP and IP add 5 to 9 % to the bytes.",
        "Compression: choosing the largest entries, PowerSGD's products and orthogonal columns, and the scales of "
        "terngrad and ef-signsgd were not timed; only memory that they must touch is counted. These steps are lower "
        "bounds.",
        "GPUs: the local work is that of kernels as quick as memory, as the CPU's are; dlion's have not been measured "
        "on a GPU yet.",
        "Sums inside an all-reduce, and everything about checks, start-up and evaluation.",
        f"More than {MOST_COUNTED:,} workers: a verdict's header counts voters in 16 bits, so beyond that the figures "
        "are of a dlion with wider fields.",
    ]


def _asked(name: str, scene: Scene, cluster: Cluster, compute: Compute) -> Result:
    work = METHODS[name](scene)
    return _told(work, step_of(work, cluster, compute), scene.sizes)


def _told(work: Work, step: Step, sizes: Sizes) -> Result:
    return {
        "seconds": step.seconds,
        **asdict(step),
        "bits_per_parameter": 8 * step.sent / sizes.parameters,
        "formula": work.formula,
        "overhead": step.sent / work.formula - 1 if work.formula else 0.0,
        "untimed": work.untimed,
    }


def _even(work: Work, scene: Scene, cluster: Cluster, compute: Compute) -> Result:
    """Against DDP in fp32, over the bandwidth of the link that is the narrowest."""
    base = METHODS[BASE](scene)

    def ahead(rate: float) -> float:
        there = widened(cluster, rate)
        return step_of(base, there, compute).seconds - step_of(work, there, compute).seconds

    return break_even(ahead)


def widened(cluster: Cluster, rate: float) -> Cluster:
    """With another bandwidth, bytes per second, between the nodes, or inside the only one."""
    if cluster.nodes > 1:
        return replace(cluster, between=replace(cluster.between, rate=rate))
    return replace(cluster, inside=replace(cluster.inside, rate=rate))


def _bandwidths(scene: Scene, cluster: Cluster, compute: Compute) -> Result:
    """Seconds of a step of every method over a range of bandwidths."""
    works = {name: make(scene) for name, make in METHODS.items()}
    return {
        "gbit_per_s": [rate / GBIT for rate in GRID],
        "seconds": {
            name: [step_of(work, widened(cluster, rate), compute).seconds for rate in GRID]
            for name, work in works.items()
        },
    }


def _numbers(scene: Scene, cluster: Cluster, compute: Compute) -> Result:
    """What so many workers do to a step, each with the same batch."""
    grown = [(replace(scene, workers=n), replace(cluster, workers=n)) for n in NUMBERS]

    def each(take: Callable[[Result], float]) -> dict[str, list[float]]:
        return {name: [take(found) for found in row] for name, row in rows.items()}

    rows = {name: [_asked(name, *where, compute) for where in grown] for name in METHODS}
    return {
        "workers": list(NUMBERS),
        "seconds": each(lambda found: found["seconds"]),
        "sent": each(lambda found: found["sent"]),
        "bits_per_parameter": each(lambda found: found["bits_per_parameter"]),
        "overhead": each(lambda found: found["overhead"]),
    }
