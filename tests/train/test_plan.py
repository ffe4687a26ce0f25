"""Guards `dlion plan`'s model: what calls take, what overlap hides, where a method breaks even, and its constants."""

import json
import random
import re
import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from dlion import channel, header, layout, methods, options, survey, topology
from dlion.train.plan import settings, votes
from dlion.train.plan.break_even import break_even
from dlion.train.plan.cluster import GLOO, NCCL, Call, Cluster, Cost, Kind, Link
from dlion.train.plan.methods import METHODS, Scene
from dlion.train.plan.rates import MEASURED_COPY, Rates
from dlion.train.plan.result import result_of
from dlion.train.plan.settings import PlanConfig
from dlion.train.plan.sizes import Sizes
from dlion.train.plan.work import Compute, Overlap, Piece, Work, step_of

KERNELS = Path(__file__).resolve().parents[2] / "bench" / "results" / "kernels"

# 8 workers on 2 nodes of 4: 1 and 10 bytes per second, hops of 3 and 0.5 s, 0.25 s for each message
CLUSTER = Cluster(8, 4, Link(0.5, 10.0), Link(3.0, 1.0), 0.25, GLOO)
ONE_NODE = replace(CLUSTER, per_node=8)


@pytest.mark.parametrize(
    ("cluster", "kind", "row", "latency", "transfer"),
    [
        (CLUSTER, "all-to-all", 2.0, 3 + 7 * 0.25, 4 * 4 * 2.0),  # each of 4 workers sends to 4 others over one link
        (ONE_NODE, "all-to-all", 2.0, 0.5 + 7 * 0.25, 7 * 2.0 / 10),
        (CLUSTER, "all-gather", 2.0, 3 + 7 * 0.25, 4 * 4 * 2.0),  # a short row: told directly
        (CLUSTER, "all-gather", 1e6, 7 * 3.0, 7e6),  # a long one: around a ring, whose slowest link counts
        (ONE_NODE, "all-gather", 1e6, 7 * 0.5, 7e5),
        (CLUSTER, "all-reduce", 8e6, 14 * 3.0, 14e6),
        (ONE_NODE, "all-reduce", 8e6, 14 * 0.5, 14e5),
        (CLUSTER, "gather", 2.0, 3 + 7 * 0.25, 4 * 2.0),  # four come from the other node
        (CLUSTER, "send-out", 2.0, 3 + 7 * 0.25, 4 * 2.0),
    ],
)
def test_what_a_call_takes(cluster: Cluster, kind: Kind, row: float, latency: float, transfer: float) -> None:
    found = cluster.cost(Call(kind, row))
    assert (found.latency, found.transfer) == pytest.approx((latency, transfer))


def test_trees_are_taken_where_latency_counts() -> None:
    trees, ring = replace(CLUSTER, workers=512, backend=NCCL), replace(CLUSTER, workers=512)
    small, large = Call("all-reduce", 1.0), Call("all-reduce", 1e9)
    # 128 nodes: 7 hops up, then 3 inside; and down again
    assert trees.cost(small) == Cost(2 * (7 * 3.0 + 3 * 0.5), 2.0)
    assert trees.cost(large) == ring.cost(large) and trees.cost(small).seconds < ring.cost(small).seconds


def test_one_worker_waits_for_nobody() -> None:
    alone = replace(CLUSTER, workers=1)
    shapes: tuple[votes.Topology, ...] = ("auto", "sharded", "replicated", "server")
    for (name, make), shape in product(METHODS.items(), shapes):
        scene = Scene(Sizes.assumed(10**6, None), 1, Rates(), shape)
        step = step_of(make(scene), alone, Compute(1.0, 2.0))
        assert step.exposed == 0 and step.sent == 0, (name, shape)
        assert step.seconds == pytest.approx(3.0 + step.local)


def walked(work: Work, cluster: Cluster, backward: float) -> float:
    """What a step exposes, walking over every bucket: the link is free or taken."""
    buckets = [piece for count, piece in work.pieces for _ in range(count)]
    parameters = sum(piece.parameters for piece in buckets)
    now = free = end = 0.0
    for piece in buckets:
        now += backward * piece.parameters / parameters + piece.before
        costs = [cluster.cost(call) for call in piece.calls]
        whole = taken = sum(cost.seconds for cost in costs)
        if work.overlap == "pipelined":  # two lanes a group
            taken = max(sum(cost.transfer for cost in costs), *(cost.seconds / 2 for cost in costs))
        free = max(free, now) + taken
        end = free + whole - taken
    return max(0.0, end - now)


@pytest.mark.parametrize("overlap", ["queued", "pipelined"])
def test_what_overlap_hides(overlap: Overlap) -> None:
    """The closed form against the walk."""
    draw = random.Random(5)
    for _ in range(200):
        rows = [draw.uniform(0, 3) for _ in range(3)]
        calls = [(Call("all-reduce", row), Call("all-reduce", 0.5 * row)) for row in rows]
        pieces = tuple(
            (draw.randint(1, 4), Piece(draw.uniform(0.1, 5), each, draw.uniform(0, 2), draw.uniform(0, 2)))
            for each in calls
        )
        work = Work(pieces, overlap)
        backward = draw.uniform(0, 300)
        step = step_of(work, CLUSTER, Compute(1.0, backward))
        assert step.exposed == pytest.approx(walked(work, CLUSTER, backward), abs=1e-9)
        assert 0 <= step.exposed <= step.exchange


def test_nothing_hides_without_overlap_or_without_a_backward_pass() -> None:
    piece = Piece(1.0, (Call("all-reduce", 1.0),), 2.0, 3.0)
    alone = CLUSTER.cost(piece.calls[0]).seconds
    step = step_of(Work(((2, piece),), update=4.0), CLUSTER, Compute(10.0, 1000.0))
    assert (step.exposed, step.exchange, step.local, step.calls) == (2 * alone, 2 * alone, 14.0, 2)
    assert step.seconds == 1010 + 14 + 2 * alone
    assert step_of(Work(((2, piece),), "queued"), CLUSTER, Compute(10.0, 0.0)).exposed == pytest.approx(2 * alone - 2)


def test_ddp_hides_what_its_buckets_let_it() -> None:
    """With one large bucket almost nothing: its gradients are complete when the backward pass is over."""
    cluster = Cluster(4, 1, Link(0.0, 1e9), Link(0.0, 1e9), 0.0, GLOO)
    sizes, times = Sizes.assumed(20 * 2**20, None), Compute(0.05, 0.1)
    exposed = {
        cap: step_of(METHODS["ddp-fp32"](Scene(sizes, 4, Rates(), bucket_cap_mb=cap)), cluster, times).exposed
        for cap in (1, 25, 100)
    }
    assert exposed[1] < exposed[25] < exposed[100] <= 8 / 4 * 6 * sizes.parameters / 1e9


def test_a_break_even_is_where_two_lines_cross() -> None:
    def ahead(rate: float) -> float:
        return (1.0 + 6e9 / rate) - (2.0 + 1e9 / rate)

    found = break_even(ahead)
    assert found["pays"] == "below" and found["mbit_per_s"] == pytest.approx(8e-6 * 5e9, rel=1e-6)
    assert break_even(lambda rate: 1.0) == {"pays": "everywhere", "mbit_per_s": None}
    assert break_even(lambda rate: 0.0) == {"pays": "nowhere", "mbit_per_s": None}


def test_the_break_even_of_a_plan_separates_slower_from_quicker() -> None:
    config, name = PlanConfig(parameters=1e8, workers=16, per_node=1), "signsgd-mavo"
    sizes = Sizes.assumed(10**8, None)
    even = result_of(config, sizes)["methods"][name]["break_even"]
    assert even["pays"] == "below"
    for factor, quicker in ((0.99, True), (1.01, False)):
        there = replace(config, bandwidth=even["mbit_per_s"] / 1000 * factor)
        assert (result_of(there, sizes)["methods"][name]["to_base"] > 1) is quicker


def test_a_node_sends_its_workers_votes_over_one_link() -> None:
    """8 + 1 bits for each parameter against 64, but with one worker a node 2 against 64."""

    def gain(per_node: int) -> float:
        config = PlanConfig(parameters=1e9, workers=512, per_node=per_node, backend="nccl", backward_share=0)
        config = replace(config, latency=0, inside_latency=0, overhead=0, inside_bandwidth=1e6, bandwidth=0.1)
        steps = result_of(config, Sizes.assumed(10**9, None))["methods"]
        return float(steps["ddp-fp32"]["exposed"] / steps["dlion-mavo"]["exposed"])

    assert gain(1) == pytest.approx(32, rel=0.02) and gain(8) == pytest.approx(64 / 9, rel=0.02)


def test_more_workers_mean_more_headers() -> None:
    numbers = result_of(PlanConfig(parameters=1e8), Sizes.assumed(10**8, None))["numbers"]
    assert numbers["workers"] == [10, 100, 1000, 10_000, 100_000]
    beyond = numbers["overhead"]["dlion-mavo"]
    assert beyond == sorted(beyond) and beyond[0] < 0.001 < 0.02 < 1 < beyond[-1]
    assert numbers["bits_per_parameter"]["ddp-fp32"][-1] == pytest.approx(64, rel=1e-4)


def test_every_method_is_planned() -> None:
    assert set(methods.METHODS) <= set(METHODS)


def test_constants_are_the_optimizers() -> None:
    for name in ("BUCKET_BYTES", "OVERLAP_BYTES", "DEVICE_BUCKET_BYTES", "DEVICE_OVERLAP_BYTES"):
        assert getattr(votes, name) == getattr(options, name)
    assert votes.WORD_BITS == layout.WORD and votes.HEADER_BYTES == header.NBYTES
    assert votes.GATHERED == survey.GATHERED
    assert votes.REPLICATED_WORDS == topology.REPLICATED_WORDS
    assert GLOO.direct_bytes == channel.DIRECT_BYTES


def test_buckets_are_larger_where_steps_are_taken_on_the_device() -> None:
    scenes = [Scene(Sizes.assumed(10**9, None), 4, Rates(), on_device=there) for there in (False, True)]
    for name in ("dlion-mavo", "dlion-mavo, overlap", "signsgd-mavo"):
        here, there = (sum(count for count, _ in METHODS[name](scene).pieces) for scene in scenes)
        assert (here > 15 * there) == name.startswith("dlion")


def test_rates_are_the_measured_ones() -> None:
    runs = [json.loads(path.read_text())["figures"] for path in sorted(KERNELS.glob("*.json"))]
    settings = json.loads((KERNELS / "1.json").read_text())["settings"]
    assert (settings["dtype"], settings["threads"]) == ("float32", "1")
    parameters = float(settings["params"])

    def ns(name: str) -> float:
        return 1e9 * statistics.median(run[name]["seconds"] for run in runs) / parameters

    found = {
        "ballot": ns("ballot"),
        "tally": ns("tally of all") / 64,
        "apply": ns("apply"),
        "generic": ns("the same, reference"),
        "adamw": ns("fused AdamW"),
        "copy": ns("copy"),
    }
    for name, value in found.items():
        assert getattr(Rates(), name) == pytest.approx(value, rel=0.01), name
    copies = statistics.median(run["copy"]["gigabytes_per_second"] for run in runs)
    assert pytest.approx(copies, rel=0.01) == MEASURED_COPY


def test_rates_follow_memory() -> None:
    quick = Rates().at(10 * MEASURED_COPY)
    assert quick.adamw == pytest.approx(Rates().adamw / 10) and quick.tally == pytest.approx(Rates().tally / 10)
    config = PlanConfig(parameters=1e6, memory=10 * MEASURED_COPY, ballot_ns=7.0)
    assert config.rates() == replace(quick, ballot=7.0)
    assert Rates().copied(8e9) == pytest.approx(Rates().copy)


def test_help_names_the_rates_that_are_taken() -> None:
    text = (Path(settings.__file__)).read_text(encoding="utf-8")
    for name in ("ballot", "tally", "apply", "generic", "adamw"):
        found = re.search(rf'{name}_ns: float \| None = None\n    """[^"]*?([0-9.]+[0-9])[^"]*"""', text)
        assert found and float(found[1]) == getattr(Rates(), name), name


def test_a_vote_is_planned_with_fused_kernels_where_it_runs_on_them() -> None:
    votes_here = [
        name for name, method in methods.METHODS.items() if method.wire in (methods.majority, methods.average)
    ]
    assert len(votes_here) == 5
    for name in votes_here:
        works = [METHODS[name](Scene(Sizes.assumed(10**6, None), 4, Rates(generic=rate))) for rate in (15.0, 150.0)]
        assert (works[0] == works[1]) == methods.METHODS[name].fused, name
