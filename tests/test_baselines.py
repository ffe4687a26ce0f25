"""Every baseline against its plain-loop oracle: parameters and each worker's own state, with and without faults."""

import copy
from typing import Any

import baseline_oracle as oracles
import numpy as np
import pytest
import torch
from oracle import Oracle
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed
from dlion.errors import NonFiniteGradientError

SHAPES = [(9, 40), (64,), (130,), (), (3, 2, 7), (0,)]
STEPS = 6
LR, DECAY = 0.01, 0.3

Steps = list[list[list[Tensor | None]]]


def gradients(workers: int, seed: int) -> Steps:
    """[step][worker][tensor]; a fifth of it exactly zero and many magnitudes equal, so that ties are common."""
    generator = torch.Generator().manual_seed(seed)

    def one(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator) * torch.rand(shape, generator=generator).round(
            decimals=2
        )

    return [[[one(shape) for shape in SHAPES] for _ in range(workers)] for _ in range(STEPS)]


def with_faults(steps: Steps) -> Steps:
    """One worker in turn has a NaN or an infinity, another one misses a gradient; in one step nobody's is finite."""
    steps, workers = copy.deepcopy(steps), len(steps[0])
    for number, step in enumerate(steps):
        step[number % workers][1] = None
        step[(number + 1) % workers][2][number] = float("nan") if number % 2 else float("inf")
    for mine in steps[3]:
        mine[0][0, 0] = float("nan")
    return steps


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def trained(steps: Steps, method: str, **options: Any) -> list[tuple[list[Tensor], list[dict[str, Tensor]], int]]:
    """Final parameters, state and t of every rank."""

    def work(rank: int, group: object) -> tuple[list[Tensor], list[dict[str, Tensor]], int]:
        params = [nn.Parameter(p.clone()) for p in start()]
        opt = Distributed(params, method, LR, weight_decay=DECAY, process_group=group, **options)
        for step in steps:
            for param, grad in zip(params, step[rank], strict=True):
                param.grad = None if grad is None else grad.clone()
            opt.step()
        return [p.detach() for p in params], [opt.state[p] for p in params], opt.param_groups[0]["t"]

    return succeed(world(len(steps[0]), work))


def run_oracle(oracle: Any, steps: Steps) -> Any:
    for step in steps:
        oracle.step([[None if g is None else g.view(-1).tolist() for g in mine] for mine in step])
    return oracle


def flat(tensors: list[Tensor]) -> list[list[np.float32]]:
    return [[np.float32(x) for x in p.view(-1).tolist()] for p in tensors]


def equal(found: Tensor, wanted: list[np.float32]) -> bool:
    return torch.equal(found.view(-1), torch.tensor(np.array(wanted, dtype=np.float32)))


def close(found: Tensor, wanted: list[np.float32]) -> bool:
    return np.allclose(found.view(-1).numpy(), np.array(wanted, dtype=np.float32), rtol=1e-3, atol=1e-4)


SIGNS = [
    ("d-signum-mavo", oracles.SignumOracle, {"momentum": 0.97}, {"betas": (0.97, 0.97)}),
    ("d-signum-avg", oracles.SignumOracle, {"zeros": "exact"}, {"betas": (0.99, 0.99)}),
    ("signsgd-mavo", oracles.SignSGDOracle, {"ties": "alternate"}, {}),
    ("signsgd-mavo", oracles.SignSGDOracle, {"zeros": "exact", "ties": "zero"}, {}),
]


@pytest.mark.wide(5)
@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("method", "kind", "options", "told"), SIGNS)
def test_signs_equal_the_oracle(
    method: str, kind: type[Oracle], options: dict[str, Any], told: dict[str, Any], workers: int, faulty: bool
) -> None:
    steps = gradients(workers, seed=workers)
    steps = with_faults(steps) if faulty else steps
    told = told | {key: options[key] for key in ("zeros", "ties") if key in options}
    told["vote"] = "average" if method.endswith("avg") else "majority"
    oracle = run_oracle(kind(workers, flat(start()), LR, weight_decay=DECAY, **told), steps)
    for params, _, t in trained(steps, method, **options):
        assert all(equal(p, wanted) for p, wanted in zip(params, oracle.params, strict=True))
        assert t == oracle.t


DESCENTS = [
    ("terngrad", oracles.TernGradOracle, {"clip": 2.5, "seed": 0}, ()),
    ("terngrad", oracles.TernGradOracle, {"clip": 0.7, "seed": 11, "momentum": 0.0}, ()),
    ("graddrop", oracles.GradDropOracle, {"keep": 0.04, "threshold": "global"}, ("residual",)),
    ("graddrop", oracles.GradDropOracle, {"keep": 0.2, "threshold": "tensor", "momentum": 0.5}, ("residual",)),
    ("dgc", oracles.DGCOracle, {"keep": 0.05, "clip": 0.0, "warmup": 4}, ("residual", "velocity")),
    ("dgc", oracles.DGCOracle, {"keep": 0.3, "clip": 9.0, "warmup": 0, "momentum": 0.7}, ("residual", "velocity")),
    ("ef-signsgd", oracles.EFSignOracle, {}, ("residual",)),
]


@pytest.mark.wide(5)
@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("method", "kind", "settings", "names"), DESCENTS)
def test_descents_equal_the_oracle(
    method: str,
    kind: type[oracles.Baseline],
    settings: dict[str, Any],
    names: tuple[str, ...],
    workers: int,
    faulty: bool,
) -> None:
    steps = gradients(workers, seed=20 + workers)
    steps = with_faults(steps) if faulty else steps
    momentum = settings.get("momentum", 0.9)
    oracle = kind(workers, flat(start()), LR, DECAY, momentum, settings, names=names)
    run_oracle(oracle, steps)
    for rank, (params, state, t) in enumerate(trained(steps, method, **settings)):
        assert t == oracle.t
        assert all(equal(p, wanted) for p, wanted in zip(params, oracle.params, strict=True))
        for name in names:
            for own, wanted in zip(state, oracle.own[name][rank], strict=True):
                assert equal(own[name], wanted), f"{name} of rank {rank}"


def test_faults_and_methods_make_a_difference() -> None:
    """What the comparisons above rest on: none of the oracles agrees with another, or with itself after a fault."""
    steps = gradients(3, seed=23)
    ends = []
    for _, kind, settings, names in DESCENTS:
        for given in (steps, with_faults(steps)):
            oracle = kind(3, flat(start()), LR, DECAY, settings.get("momentum", 0.9), settings, names=names)
            ends.append(tuple(map(float, run_oracle(oracle, given).params[0])))
    assert len(set(ends)) == len(ends)


@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_powersgd_is_close_to_the_oracle(workers: int, faulty: bool) -> None:
    steps = gradients(workers, seed=40 + workers)
    steps = with_faults(steps) if faulty else steps
    first = torch.randn(40, 2, generator=torch.Generator().manual_seed(7)).double().tolist()
    settings = {"q": {0: first}}
    oracle = oracles.PowerSGDOracle(workers, flat(start()), LR, DECAY, 0.9, settings, names=("residual",))
    run_oracle(oracle, steps)
    ranks = trained(steps, "powersgd", rank=2, seed=7)
    for rank, (params, state, t) in enumerate(ranks):
        assert t == oracle.t
        assert all(torch.equal(p, q) for p, q in zip(params, ranks[0][0], strict=True))
        assert all(close(p, wanted) for p, wanted in zip(params, oracle.params, strict=True))
        assert close(state[0]["residual"], oracle.own["residual"][rank][0])


@pytest.mark.parametrize("topology", ["replicated", "server"])
@pytest.mark.parametrize("method", ["graddrop", "dgc", "ef-signsgd"])
def test_topologies_give_the_same_bits(method: str, topology: str) -> None:
    steps = with_faults(gradients(3, seed=60))
    wanted = trained(steps, method)[0][0]
    for params, _, _ in trained(steps, method, topology=topology):
        assert all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True))


@pytest.mark.parametrize("method", ["terngrad", "d-signum-avg", "signsgd-mavo"])
def test_buckets_and_topologies_move_no_bit(method: str) -> None:
    steps = gradients(3, seed=61)
    wanted = trained(steps, method)[0][0]
    for options in ({"topology": "sharded", "bucket_bytes": 8}, {"topology": "server", "bucket_bytes": 16}):
        for params, _, _ in trained(steps, method, **options):
            assert all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True))


def test_settings_that_differ_are_named_even_where_rows_would_have_other_lengths() -> None:
    def work(rank: int, group: object, method: str, name: str, value: Any) -> str:
        params = [nn.Parameter(p.clone()) for p in start()]
        opt = Distributed(params, method, LR, process_group=group, timeout=20)
        for step in gradients(2, seed=1)[:2]:
            if opt.param_groups[0].get("t", 0) == 1 and rank == 1:
                opt.param_groups[0][name] = value
            for param, grad in zip(params, step[rank], strict=True):
                param.grad = grad.clone()
            try:
                opt.step()
            except RuntimeError as error:
                return str(error)
        return "no error"

    for method, name, value in (("dgc", "keep", 0.5), ("graddrop", "keep", 0.5), ("powersgd", "rank", 1)):
        for text in succeed(world(2, lambda r, g, m=method, n=name, v=value: work(r, g, m, n, v))):
            assert f"{name}={value}" in text and "hyper-parameters or step counts differ" in text
    for text in succeed(world(2, lambda r, g: work(r, g, "dgc", "t", 900))):
        assert "t=900" in text


SURVEYED = ["terngrad", "graddrop", "dgc", "powersgd"]


@pytest.mark.parametrize("method", [*SURVEYED, "ef-signsgd", "signsgd-mavo", "g-adamw"])
def test_a_layer_frozen_on_one_worker_is_named_and_on_all_it_is_left_out(method: str) -> None:
    def work(rank: int, group: object, frozen_ranks: tuple[int, ...]) -> tuple[str, Tensor]:
        named = [(f"p{k}", nn.Parameter(p.clone())) for k, p in enumerate(start())]
        opt = Distributed(named, method, LR, process_group=group, timeout=20)
        for number, step in enumerate(gradients(3, seed=5)[:3]):
            named[0][1].requires_grad_(number < 1 or rank not in frozen_ranks)
            for (_, param), grad in zip(named, step[rank], strict=True):
                param.grad = grad.clone()
            try:
                opt.step()
            except RuntimeError as error:
                return str(error), named[0][1].detach()
        return "", torch.cat([p.detach().view(-1) for _, p in named])

    for text, _ in succeed(world(3, lambda rank, group: work(rank, group, (2,)))):
        assert "the layout changed on rank 2 alone" in text and "p0" in text
    ranks = succeed(world(3, lambda rank, group: work(rank, group, (0, 1, 2))))
    assert [text for text, _ in ranks] == [""] * 3
    assert all(torch.equal(params, ranks[0][1]) for _, params in ranks)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("method", [*SURVEYED, "ef-signsgd"])
def test_policies_write_no_parameter(method: str, nonfinite: str) -> None:
    def work(rank: int, group: object) -> tuple[list[Tensor], str]:
        params = [nn.Parameter(p.clone()) for p in start()]
        opt = Distributed(params, method, LR, process_group=group, nonfinite=nonfinite)
        for param, grad in zip(params, gradients(2, seed=8)[0][rank], strict=True):
            param.grad = grad
        params[rank].grad.view(-1)[0] = float("inf")
        try:
            opt.step()
        except NonFiniteGradientError as error:
            return params, str(error)
        return params, f"{opt.stats.skipped} skipped"

    for params, text in succeed(world(2, work)):
        assert all(torch.equal(a, b) for a, b in zip(params, start(), strict=True))
        assert text == "1 skipped" if nonfinite == "skip" else "rank 0" in text and "rank 1" in text


def test_terngrad_rounds_without_bias() -> None:
    """Over many steps the mean of what is said is the clipped gradient; 1 worker, so nothing is averaged."""
    wanted = torch.linspace(-1, 1, 9)
    param = nn.Parameter(torch.zeros(9))
    opt = Distributed([param], "terngrad", lr=1.0, clip=0.0, momentum=0.0, seed=3)
    steps = 1000
    for _ in range(steps):
        param.grad = wanted.clone()
        opt.step()
    # one deviation of the mean of 1,000 such lots is at most 0.5/sqrt(1000) = 0.016
    torch.testing.assert_close(-param.detach() / steps, wanted, atol=0.08, rtol=0)


def test_powersgd_starts_again_after_a_step_without_gradient() -> None:
    """A Q of zeros would answer zero for ever."""
    param = nn.Parameter(torch.ones(9, 40))
    opt = Distributed([param], "powersgd")
    opt.step()
    assert torch.equal(param.detach(), torch.ones(9, 40))
    param.grad = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    opt.step()
    assert torch.linalg.matrix_rank(1 - param.detach()) == 2
