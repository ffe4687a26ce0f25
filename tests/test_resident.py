"""Steps taken on the device have the bits, counts and errors of steps on the host; CPU tensors stand for a device's."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed
from dlion.exchange import Exchange
from dlion.resident import choice
from dlion.resident.exchange import ResidentExchange

STEPS = 12
SHAPES = ((17, 3), (130,), (), (5, 64), (1,), (0, 4), (3, 7, 11))
BUCKET = 16  # bytes, two words: several buckets, and tensors that are cut
WORKERS = (1, 2, 3, 5)
TOPOLOGIES = ("sharded", "replicated", "server")
VOTES: list[dict[str, Any]] = [
    {"ties": "rotate"},
    {"ties": "alternate"},
    {"zeros": "exact", "ties": "rotate"},
    {"zeros": "exact", "ties": "alternate"},
    {"zeros": "exact", "ties": "zero"},
    {"method": "dlion-avg"},
    {"method": "dlion-avg", "zeros": "exact"},
    {"method": "d-signum-mavo"},
]
# step -> the ranks whose gradients are not finite in some place: None for all of them everywhere
BAD: dict[int, tuple[int, ...] | None] = {2: (0,), 5: (1, 2), 7: None, 9: (4,)}


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choice, "is_accelerator", lambda device: True)
    return None


def make_model(dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Module()
    for k, shape in enumerate(SHAPES):
        model.register_parameter(f"p{k}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
    model.p3.data = model.p3.data.t()  # not contiguous
    model.frozen = nn.Parameter(torch.ones(9, dtype=dtype), requires_grad=False)
    return model


def set_gradients(model: nn.Module, rank: int, step: int) -> None:
    """Other ones on each rank: some missing, some zeros, and now and then what is not finite."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for k in range(len(SHAPES)):
        param = getattr(model, f"p{k}")
        grad = torch.randn(param.shape, generator=generator)
        missing = (k + rank + step) % 5 == 0
        param.grad = None if missing else torch.where(grad.abs() < 0.3, 0.0, grad).to(param.dtype)
    ranks = BAD.get(step, ())
    for k in (1, 3) if ranks is not None else range(len(SHAPES)):
        if ranks is None or rank in ranks:
            param = getattr(model, f"p{k}")
            grad = torch.full(param.shape, math.nan if ranks is None else 1.0, dtype=param.dtype)
            grad.view(-1)[-1:] = math.inf
            param.grad = grad


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups, each with hyper-parameters of its own; one lr is a tensor."""
    params = dict(model.named_parameters())
    lr = torch.tensor(0.003)
    return [
        {"params": [params["p0"], params["p3"], params["frozen"]]},
        {"params": [params["p1"], params["p2"], params["p5"]], "lr": lr, "weight_decay": 0.3},
        {"params": [params["p4"], params["p6"]], "betas": (0.5, 0.7), "maximize": True},
    ]


def trained(rank: int, group: Any, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    model = make_model(dtype)
    optimizer = Distributed(
        groups_of(model),
        lr=0.01,
        weight_decay=0.1,
        process_group=group,
        timeout=20,
        bucket_bytes=BUCKET,
        verify_every=2,
        **options,
    )
    seen: list[Tensor] = []
    for step in range(STEPS):
        set_gradients(model, rank, step)
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.param_groups[1]["lr"] *= 0.9  # a tensor, in place
        optimizer.step()
        seen += [p.detach().clone() for p in model.parameters()]
        seen += [optimizer.state[p]["exp_avg"].clone() for p in model.parameters() if p.requires_grad]
    optimizer.check()
    return {
        "kind": type(optimizer._renewal._exchange),
        "seen": seen,
        "t": [int(each["t"]) for each in optimizer.param_groups],
        "stats": optimizer.stats.state_dict(),
        "state": optimizer.state_dict()["param_groups"],
    }


def both(monkeypatch: pytest.MonkeyPatch, workers: int, cases: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Of each rank and case, what the path on the host gives, and the one on the device."""

    def run() -> list[Any]:
        if workers == 1:
            return [[trained(0, None, **case) for case in cases]]
        return succeed(world(workers, lambda rank, group: [trained(rank, group, **case) for case in cases]))

    host = run()
    monkeypatch.setattr(choice, "is_accelerator", lambda device: True)
    device = run()
    return [pair for a, b in zip(host, device, strict=True) for pair in zip(a, b, strict=True)]


def assert_same(host: dict[str, Any], device: dict[str, Any], case: Any = None) -> None:
    assert host["kind"] is Exchange and device["kind"] is ResidentExchange
    for place, (a, b) in enumerate(zip(host["seen"], device["seen"], strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), (case, place)
    assert host["t"] == device["t"] and host["stats"] == device["stats"] and host["state"] == device["state"], case


@pytest.mark.wide(9)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("number", range(len(VOTES)), ids=lambda number: "-".join(map(str, VOTES[number].values())))
def test_every_vote_gives_the_bits_of_the_host(number: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = list(itertools.product(TOPOLOGIES, ("abstain", "skip")))
    first = number + 2 * WORKERS.index(workers)  # two for each number of workers, together all six
    chosen = [ways[(first + k) % len(ways)] for k in range(2)] if workers > 1 else [("auto", "abstain")]
    cases = [VOTES[number] | {"topology": topology, "nonfinite": policy} for topology, policy in chosen]
    for k, (host, device) in enumerate(both(monkeypatch, workers, cases)):
        assert_same(host, device, cases[k % len(cases)])
        assert host["stats"]["abstentions"] > 0 and 0 < host["t"][0] < STEPS


PRECISIONS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.bfloat16, {}),
    (torch.bfloat16, {"momentum_dtype": torch.bfloat16, "method": "dlion-avg"}),
    (torch.float16, {"zeros": "exact"}),
    (torch.float64, {"rounding": "nearest"}),
]


@pytest.mark.wide(3)
@pytest.mark.parametrize(("dtype", "options"), PRECISIONS)
def test_every_precision_gives_the_bits_of_the_host(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for host, device in both(monkeypatch, 3, [options | {"dtype": dtype, "nonfinite": "skip", "topology": "sharded"}]):
        assert_same(host, device)


# ---- what is not chosen


@pytest.mark.parametrize("options", [{"method": "g-lion"}, {"method": "signsgd-mavo"}])
def test_other_steps_are_taken_as_ever(options: dict[str, Any], on_device: None) -> None:
    param = nn.Parameter(torch.ones(70))
    optimizer = Distributed([param], **options)
    param.sum().backward()
    optimizer.step()
    assert type(optimizer._renewal._exchange) is Exchange


def test_on_cpu_tensors_nothing_changes() -> None:
    param = nn.Parameter(torch.ones(70))
    optimizer = Distributed([param])
    param.grad = torch.ones(70)
    optimizer.step()
    assert type(optimizer._renewal._exchange) is Exchange and optimizer.param_groups[0]["t"] == 1
    assert type(optimizer.param_groups[0]["t"]) is int


def test_where_rows_travel_elsewhere_steps_stay_on_the_host() -> None:
    param, device = nn.Parameter(torch.ones(1, device="meta")), torch.device("meta")
    assert choice.resides(True, [param], device) and choice.resides(True, [param], None)
    assert not choice.resides(True, [param], torch.device("cpu"))
    assert not choice.resides(True, [param, nn.Parameter(torch.ones(1))], device)
    assert not choice.resides(False, [param], device)
    assert not choice.resides(True, [], device)
    assert not choice.resides(True, [nn.Parameter(torch.ones(1))], torch.device("cpu"))
