"""Infinities and NaNs in gradients, in every path: what each policy does, to the bit, and what is counted."""

import itertools
import math
from typing import Any

import bad_gradients
import pytest
import torch
from bad_gradients import BUCKET_BYTES, SHAPES, WORKERS, bad_in, facts, faults_in, train_real, train_simulated
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed
from dlion.errors import NonFiniteGradientError
from dlion.simulate import Simulation

LR, DECAY, BETAS = 0.01, 0.1, (0.9, 0.99)
EVERYTHING: list[tuple[int, int | None]] = [(tensor, None) for tensor in range(3)]
# step -> rank -> where its gradient is not finite: (tensor, element), None for all elements
POISON: dict[int, dict[int, list[tuple[int, int | None]]]] = {
    1: {1: [(0, 3)]},
    2: {0: [(2, None)], 2: [(0, 70), (0, 100)]},
    3: {rank: EVERYTHING for rank in range(3)},  # nobody votes anywhere
    4: {rank: [(0, None)] for rank in range(3)},  # nobody votes in the first tensor's buckets
    6: {2: EVERYTHING},
}
STEPS = 8
TENSORS = ((150,), (64,), (5, 7))
VOTES = {
    "majority": {},
    "average": {"method": "dlion-avg"},
    "ternary": {"zeros": "exact"},
    "ternary average": {"method": "dlion-avg", "zeros": "exact"},
}
PATHS = {"generic": {"kernels": "reference"}, "fused": {}, "overlap": {"overlap": True}}
TOPOLOGIES = ("sharded", "replicated", "server")
POLICIES = ("abstain", "skip", "raise")


def poisoned(rank: int, step: int) -> list[tuple[int, int | None]]:
    return POISON.get(step, {}).get(rank, [])


def buckets_of(places: list[tuple[int, int | None]]) -> set[int]:
    """Buckets of 64 elements: three of the first tensor, one of each other."""
    found: set[int] = set()
    for tensor, element in places:
        found |= {tensor + 2} if tensor else {0, 1, 2} if element is None else {element // 64}
    return found


def gradients(rank: int, step: int) -> list[Tensor]:
    noise = torch.Generator().manual_seed(100 * step + rank)
    grads = [torch.randn(shape, generator=noise) for shape in TENSORS]
    for kind, (tensor, element) in enumerate(poisoned(rank, step)):
        grads[tensor].view(-1)[slice(None) if element is None else element] = (math.nan, math.inf, -math.inf)[kind % 3]
    return grads


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList([torch.ones(shape) for shape in TENSORS])

    def backward(self, rank: int, step: int) -> None:
        self.zero_grad()
        pairs = zip(self.values, gradients(rank, step), strict=True)
        sum(((param * grad).sum() for param, grad in pairs), torch.zeros(())).backward()


def step_or_error(optimizer: Distributed, said: list[str]) -> None:
    try:
        optimizer.step()
    except NonFiniteGradientError as error:
        said.append(str(error))


def told(model: Model, optimizer: Distributed, states: list[Any], said: list[str]) -> dict[str, Any]:
    counted = optimizer.stats
    return {
        "params": [param.detach() for param in model.values],
        "momenta": [[kept["exp_avg"].clone() for kept in state.values()] for state in states],
        "counters": (counted.steps, counted.skipped, counted.abstentions, optimizer.param_groups[0]["t"]),
        "said": said,
    }


def real(rank: int, group: Any, **options: Any) -> dict[str, Any]:
    model, said = Model(), []
    optimizer = Distributed(
        model.named_parameters(), lr=LR, weight_decay=DECAY, bucket_bytes=8, process_group=group, **options
    )
    for step in range(STEPS):
        model.backward(rank, step)
        step_or_error(optimizer, said)
    return told(model, optimizer, [optimizer.state], said)


def simulated(**options: Any) -> dict[str, Any]:
    model, said = Model(), []
    simulation = Simulation(model, workers=3, lr=LR, weight_decay=DECAY, bucket_bytes=8, **options)
    for step in range(STEPS):
        for rank in range(3):
            with simulation.worker(rank):
                model.backward(rank, step)
        step_or_error(simulation, said)
    return told(model, simulation, [simulation.state_dict(rank)["state"] for rank in range(3)], said)


def momenta_by_hand(rank: int) -> list[Tensor]:
    """Whatever the policy: where the gradient is not finite the momentum stays, elsewhere it moves."""
    momenta = [torch.zeros(shape) for shape in TENSORS]
    for step in range(STEPS):
        for momentum, grad in zip(momenta, gradients(rank, step), strict=True):
            moved = momentum * BETAS[1] + grad * (1 - BETAS[1])
            momentum.copy_(torch.where(grad.isfinite(), moved, momentum))
    return momenta


def counters_by_hand(policy: str) -> tuple[int, int, int, int]:
    """Steps, skipped, abstentions and t. An abstention is a ballot of one bucket that did not count."""
    bad_steps, lost_steps = len(POISON), 1  # in step 3 nobody votes at all
    buckets = sum(len(buckets_of(places)) for ranks in POISON.values() for places in ranks.values())
    if policy == "abstain":
        return STEPS, lost_steps, buckets, STEPS - lost_steps
    done = STEPS - bad_steps
    return (STEPS, bad_steps, buckets, done) if policy == "skip" else (done, 0, buckets, done)


def equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(map(torch.equal, these, those))


@pytest.mark.wide(7)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("vote", VOTES)
def test_every_path_and_topology_agrees_to_the_bit_and_counts_right(vote: str, policy: str) -> None:
    options = {**VOTES[vote], "nonfinite": policy}
    cases = [PATHS[path] | {"topology": topology} for path, topology in itertools.product(PATHS, TOPOLOGIES)]
    ranks = succeed(world(3, lambda r, g: [real(r, g, **options, **case) for case in cases]))
    ranks += [[simulated(**options, kernels=kernels)] for kernels in ("auto", "reference")]
    first = ranks[0][0]
    assert first["counters"] == counters_by_hand(policy)
    for rank, results in enumerate(ranks):
        for result in results:
            assert equal(result["params"], first["params"])
            assert all(tensor.isfinite().all() for tensor in result["params"])
            assert result["counters"] == first["counters"] and result["said"] == first["said"]
            of = range(3) if rank >= 3 else [rank]
            assert all(equal(mine, momenta_by_hand(r)) for mine, r in zip(result["momenta"], of, strict=True))
    assert len(first["said"]) == (len(POISON) if policy == "raise" else 0)
    for step, text in zip(POISON, first["said"], strict=False):
        named = [f"values.{min(t for t, _ in places)} on rank {rank}" for rank, places in POISON[step].items()]
        assert f"the gradient is not finite in {', '.join(named)} at step t=" in text


def test_a_policy_forbids_or_raises_as_if_the_step_had_not_been() -> None:
    """With "skip" and "raise" the same parameters, those of a run that votes in clean steps alone."""
    model = Model()
    simulation = Simulation(model, workers=3, lr=LR, weight_decay=DECAY, bucket_bytes=8)
    for step in range(STEPS):
        for rank in range(3):
            with simulation.worker(rank):
                model.backward(rank, step)
        before = [param.detach().clone() for param in model.values]
        t = simulation.param_groups[0]["t"]
        simulation.step()
        if step in POISON:
            for param, kept in zip(model.values, before, strict=True):
                param.detach().copy_(kept)
            simulation.param_groups[0]["t"] = t
    clean = [param.detach() for param in model.values]
    assert all(equal(simulated(nonfinite=policy)["params"], clean) for policy in ("skip", "raise"))
    assert not equal(simulated()["params"], clean)


def test_clipping_by_an_infinite_norm_leaves_zeros_that_vote_and_a_nan_that_does_not() -> None:
    """Without a scaler: torch's clipping multiplies by 0, and makes a NaN of the infinity."""
    param, other = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))
    optimizer = Distributed([param, other], lr=LR, bucket_bytes=8)
    for value in (1.0, math.inf):
        param.grad, other.grad = torch.ones(64), torch.ones(64)
        param.grad[5] = value
        nn.utils.clip_grad_norm_([param, other], 1.0)
        optimizer.step()
    assert param.grad is not None and other.grad is not None
    assert param.grad.isnan().sum() == 1 and not other.grad.any()
    assert optimizer.stats.abstentions == 1
    assert torch.equal(param.detach(), torch.full((64,), 1 - LR))  # moved once
    assert torch.equal(other.detach(), torch.full((64,), 1 - LR) - LR)  # its momentum voted the second time


# ---- for long: bench/bad_gradients.py does 10,000 steps, in real processes as well


@pytest.mark.slow
@pytest.mark.parametrize("kind", bad_gradients.KINDS)
def test_a_long_run_with_a_bad_gradient_now_and_then(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_gradients, "PERIOD", 20)
    bad_in.cache_clear()
    steps = 200
    assert sum(bad_in(step) is not None for step in range(steps)) == 10
    found = succeed(world(WORKERS, lambda rank, group: train_real(rank, kind, steps, group)))
    assert faults_in(found, kind, steps) == []
    if kind in ("majority", "skip"):
        alone = train_simulated(kind, steps)
        assert faults_in([alone], kind, steps) == [] and alone["checksum"] == found[0]["checksum"]
    bad_in.cache_clear()


def test_a_fault_in_a_long_run_is_found() -> None:
    assert len(SHAPES) == 4 and BUCKET_BYTES == 256
    model = bad_gradients.Valley()
    optimizer = Distributed(model.named_parameters(), lr=LR)
    good = {"checksum": 1, "finite": True, "t": 0, "skipped": 0, "abstentions": 0, "height": 0.01}
    assert faults_in([good, good], "majority", 0) == []
    for name, value in {"checksum": 2, "finite": False, "t": 1, "skipped": 1, "abstentions": 1, "height": 0.5}.items():
        assert len(faults_in([good, good | {name: value}], "majority", 0)) == 1
    model.backward(0, 0)
    optimizer.step()
    next(iter(optimizer.state.values()))["exp_avg"][0] = torch.nan
    assert not facts(model, optimizer, [optimizer.state])["finite"]
