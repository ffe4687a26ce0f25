"""Faults and attacks in a simulation: what each does, exactly; and what a vote survives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed
from dlion.errors import NonFiniteGradientError
from dlion.layout import Layout
from dlion.methods import METHODS
from dlion.simulate import ACTS, Fault, Simulation
from dlion.simulate.attacks import OfNumbers, OfSigns, OfTernary

WORKERS = 5
SHAPES = ((30, 5), (70,), ())
Gradient = Callable[[int, int, Tensor], Tensor | None]  # (rank, step, parameter)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.values = nn.ParameterList([torch.randn(shape, generator=generator) for shape in SHAPES])


def noise(rank: int, step: int, param: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(param.shape, generator=generator)


def simulate(gradient: Gradient, steps: int = 4, **options: Any) -> tuple[list[Tensor], Simulation]:
    model = Small()
    simulation = Simulation(model, **{"workers": WORKERS, "lr": 0.01, **small_buckets(**options)})
    for step in range(steps):
        for rank in range(simulation.workers):
            with simulation.worker(rank):
                for param in model.parameters():
                    param.grad = gradient(rank, step, param)
        simulation.step()
    return [param.detach() for param in model.parameters()], simulation


def small_buckets(method: str = "dlion-mavo", **others: Any) -> dict[str, Any]:
    """The options, and buckets of 128 elements where the method can cut its ballots."""
    small = {"bucket_bytes": 16 * 32 if method.startswith("g-") else 16}
    small = small if "bucket_bytes" in METHODS[method].options else {}
    return {"method": method, **small, **others}


def real(gradient: Gradient, steps: int = 4, **options: Any) -> list[Tensor]:
    def work(rank: int, group: Any) -> list[Tensor]:
        model = Small()
        optimizer = Distributed(model.parameters(), process_group=group, lr=0.01, **small_buckets(**options))
        for step in range(steps):
            for param in model.parameters():
                param.grad = gradient(rank, step, param)
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    return list(succeed(world(WORKERS, work))[0])


def equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(map(torch.equal, these, those))


def changed(
    ranks: tuple[int, ...], change: Callable[[Tensor], Tensor], steps: tuple[int, ...] = (0, 1, 2, 3)
) -> Gradient:
    """`noise`, but what some ranks have in some steps is changed."""
    return lambda r, s, p: change(noise(r, s, p)) if r in ranks and s in steps else noise(r, s, p)


def momenta(simulation: Simulation, rank: int) -> list[Tensor]:
    return [each["exp_avg"] for each in simulation.state_dict(rank)["state"].values()]


# ---- what each act is, said with real workers


@pytest.mark.wide(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("act", ["absent", "nan"])
def test_who_is_absent_or_has_nothing_but_nan_abstains_and_rests(act: str, method: str) -> None:
    gradient = changed((1, 4), lambda grad: torch.full_like(grad, torch.nan), (1, 2))
    found, simulation = simulate(noise, method=method, faults=[Fault(act, (1, 4), range(1, 3))])
    assert equal(found, real(gradient, method=method))
    assert simulation.stats.abstentions == 2 * 2 * len(simulation._team.layout.buckets)
    assert not equal(found, simulate(noise, method=method)[0])


@pytest.mark.parametrize("zeros", ["balanced", "exact"])
@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg"])
def test_inverted_signs_are_those_of_the_negated_gradient(method: str, zeros: str) -> None:
    options = {"method": method, "zeros": zeros}
    found, _ = simulate(noise, faults=[Fault("inverted", (0, 3))], **options)
    assert equal(found, real(changed((0, 3), torch.neg), **options))
    assert not equal(found, simulate(noise, **options)[0])


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_step_in_which_all_are_absent_moves_nothing(method: str) -> None:
    lost = [Fault("absent", range(WORKERS), (1,))]
    found, simulation = simulate(noise, steps=2, method=method, faults=lost)
    assert equal(found, simulate(noise, steps=1, method=method)[0])
    assert simulation.stats.skipped == 1 and simulation.param_groups[0]["t"] == 1


def test_who_is_late_has_moved_its_momentum_and_not_voted() -> None:
    fault = (Fault("late", (2,), (3,)),)
    found, simulation = simulate(noise, faults=fault)
    others, absent = simulate(noise, faults=[Fault("absent", (2,), (3,))])
    _, honest = simulate(noise)
    assert equal(found, others)
    assert equal(momenta(simulation, 2), momenta(honest, 2))
    assert not equal(momenta(absent, 2), momenta(honest, 2))


def test_a_policy_meets_nan_of_a_fault_as_that_of_a_gradient() -> None:
    fault = [Fault("nan", (3,), (2,))]
    _, simulation = simulate(noise, nonfinite="skip", faults=fault)
    assert simulation.stats.skipped == 1 and simulation.param_groups[0]["t"] == 3
    with pytest.raises(NonFiniteGradientError, match=r"not finite in values\.0 on rank 3 at step t=2"):
        simulate(noise, nonfinite="raise", faults=fault)


@pytest.mark.parametrize("zeros", ["balanced", "exact"])
def test_random_signs_are_random_and_the_same_again(zeros: str) -> None:
    options: dict[str, Any] = {"zeros": zeros, "faults": [Fault("random", range(WORKERS))], "lr": 1.0, "steps": 1}
    found, _ = simulate(noise, **options)
    assert equal(found, simulate(noise, **options)[0])
    moves = torch.cat([(a - b).flatten() for a, b in zip(found, Small().parameters(), strict=True)])
    up = float((moves > 0).double().mean())
    assert 0.35 < up < 0.65  # 221 elements: four standard deviations are 0.13
    own = torch.cat([torch.stack([noise(r, 0, p) for r in range(WORKERS)]).sign().sum(0).flatten() for p in found])
    assert 0.35 < float(((moves > 0) == (own < 0)).double().mean()) < 0.65


def test_colluders_say_the_opposite_of_the_honest_majority() -> None:
    """Two of five against three: where those three agree they win, else the colluders do."""
    found, _ = simulate(noise, steps=1, lr=1.0, faults=[Fault("colluding", (0, 2))])
    for number, (param, before) in enumerate(zip(found, Small().parameters(), strict=True)):
        votes = torch.stack([-noise(rank, 0, before).sign() for rank in (1, 3, 4)])
        honest = votes.sum(0)
        wanted = torch.where(honest.abs() == 3, honest.sign(), -honest.sign())
        assert torch.equal((param - before).sign(), wanted), number


@pytest.mark.parametrize("method", METHODS)
def test_every_method_meets_every_fault_or_says_why_not(method: str) -> None:
    for act in ACTS:
        faults = [Fault(act, (1,), (1, 2))]
        try:
            found, simulation = simulate(noise, method=method, faults=faults)
        except ValueError as error:
            assert act in ("random", "inverted", "colluding")
            assert str(error).startswith(f"method={method!r} sends more than signs")
            continue
        assert all(param.isfinite().all() for param in found)
        assert not equal(found, simulate(noise, method=method)[0]), act
        assert simulation.stats.steps == 4


def test_attacks_on_numbers_keep_their_sizes() -> None:
    bucket = Layout.of([{"params": list(Small().parameters())}], 1000, 1).buckets[0]
    planes = torch.randn(1, bucket.size, generator=torch.Generator().manual_seed(3))
    attack = OfNumbers()
    changed = attack.random(planes, bucket, 1, 2)
    assert torch.equal(changed.abs(), planes.abs()) and 0.3 < float((changed == planes).double().mean()) < 0.7
    assert torch.equal(attack.inverted(planes, bucket), -planes)
    assert torch.equal(attack.agreed([planes, 3 * planes], bucket, 0), 2 * planes)


@pytest.mark.parametrize(("method", "kind"), [("dlion-mavo", OfSigns), ("dlion-avg", OfSigns), ("g-adamw", OfNumbers)])
def test_the_form_of_the_ballot_decides_how_it_is_attacked(method: str, kind: type) -> None:
    assert isinstance(Simulation(Small(), method, workers=2)._team.attack, kind)
    if method.startswith("dlion"):
        assert isinstance(Simulation(Small(), method, workers=2, zeros="exact")._team.attack, OfTernary)


# ---- how they are chosen


def test_faults_may_be_a_function_of_rank_and_step() -> None:
    listed, _ = simulate(noise, faults=[Fault("late", (1,), (2,)), Fault("inverted", (1, 2))])

    def act(rank: int, step: int) -> str | None:
        return "late" if (rank, step) == (1, 2) else "inverted" if rank in (1, 2) else None

    assert equal(listed, simulate(noise, faults=act)[0])


def test_what_an_absent_worker_computes_may_be_left_out() -> None:
    model = Small()
    simulation = Simulation(model, workers=WORKERS, lr=0.01, bucket_bytes=16, faults=[Fault("absent", (3,))])
    for step in range(4):
        for rank in range(WORKERS):
            if simulation.act(rank) != "absent":
                with simulation.worker(rank):
                    for param in model.parameters():
                        param.grad = noise(rank, step, param)
        simulation.step()
    everybody, _ = simulate(noise, faults=[Fault("absent", (3,))])
    assert equal([param.detach() for param in model.parameters()], everybody)


def test_impossible_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="act='asleep' is not known: choose one of absent, late"):
        Fault("asleep", (1,))
    with pytest.raises(ValueError, match="is of worker 5, and there are workers 0 to 4"):
        simulate(noise, faults=[Fault("late", (1, 5))])
    with pytest.raises(ValueError, match="act='asleep'"):
        simulate(noise, faults=lambda rank, step: "asleep")
    for workers, steps in ((1, None), ("1", None), ([1.0], None), ([-1], None), ([1], 3), ([1], "3")):
        with pytest.raises(ValueError, match="of a fault must be a collection of whole numbers"):
            Fault("late", workers, steps)  # type: ignore[arg-type]
    for faults in (Fault("late", [1]), "late", [("late", [1])], None):
        with pytest.raises(ValueError, match="is no list of faults"):
            simulate(noise, faults=faults)


# ---- what a vote survives


def distance(method: str, act: str | None, attackers: int, workers: int = 9) -> float:
    """How far from the minimum of a noisy quadratic 120 steps end; 1 is where they began."""
    model = nn.Module()
    model.x = nn.Parameter(torch.ones(400))
    faults = [Fault(act, range(attackers))] if act else []
    simulation = Simulation(model, method, workers=workers, lr=0.02, faults=faults)
    generator = torch.Generator().manual_seed(7)
    for _ in range(120):
        for rank in range(workers):
            with simulation.worker(rank):
                noisy = model.x + 0.5 * torch.randn(400, generator=generator)
                (0.5 * noisy.square()).sum().backward()
        simulation.step()
    return float(model.x.detach().abs().mean())


def test_a_majority_of_inverters_stops_convergence_and_a_minority_does_not() -> None:
    assert distance("dlion-mavo", None, 0) < 0.15  # the noise and a constant learning rate let it come no nearer
    assert distance("dlion-mavo", "inverted", 4) < 0.3
    assert distance("dlion-mavo", "inverted", 5) > 2  # 1 + 120 * 0.02 = 3.4 is as far as it could go


def test_colluders_do_more_harm_than_random_signs() -> None:
    harm = {act: distance("dlion-mavo", act, 4) for act in ("random", "inverted", "colluding")}
    assert harm["random"] < 0.1 and harm["colluding"] > 0.2
    assert harm["random"] < harm["inverted"] < harm["colluding"]
