"""The paper's theorems (arXiv 2404.00438, section 3) hold for this code, and each check fails for a rule that is wrong.

The box is `|x| <= 1/wd`. Every margin is computed: rounding, a bound that is derived where it is used, or five
standard deviations. The KKT score has a file of its own, test_theory_score.py.
"""

from collections.abc import Callable
from functools import partial
from math import erf, exp, lgamma, log, sqrt
from typing import Any

import pytest
import torch
from lockstep import VOTES, Lockstep, lion
from sabotage import (
    DecayedInGradient,
    DecayedLate,
    FirstVoter,
    Inverted,
    Sabotage,
    Signed,
    Summed,
    Undecayed,
    being,
    counting,
    honest,
    reading,
)
from torch import Tensor
from world import succeed, world

import dlion

EPSILON = torch.finfo(torch.float64).eps


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# What is stepped without a network is what is stepped with one.


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("workers", [2, 3])
def test_lockstep_is_a_real_world(vote: str, workers: int) -> None:
    start, gradients = normal(1, 130), normal(2, 12, workers, 130)
    gradients[:, :, 7] = 0.0  # votes of zeros too
    steps = Lockstep(start, workers, lion(vote, workers), lr=0.1, weight_decay=0.5)
    for each in gradients:
        steps.step(list(each))
    for point in real_world(start, gradients, vote, lr=0.1, weight_decay=0.5):
        assert torch.equal(point[-1], steps.point)


def real_world(start: Tensor, gradients: Tensor, vote: str, **hyper: Any) -> list[list[Tensor]]:
    """Every worker's parameters after every step of the optimizer, over Gloo; gradients f[steps, workers, d]."""

    def work(rank: int, group: Any) -> list[Tensor]:
        param = torch.nn.Parameter(start.clone())
        optimizer = dlion.DistributedLion([param], vote=vote, process_group=group, **hyper)
        points = []
        for each in gradients:
            param.grad = each[rank].clone()
            optimizer.step()
            points.append(param.detach().clone())
        return points

    return succeed(world(gradients.shape[1], work))


# Theorem 3.4: the distance to the box shrinks by (1 - lr*wd) in each step, and the box is never left again.

LR, DECAY, STEPS = 0.2, 0.5, 60
RADIUS, SHRINK = 1 / DECAY, 1 - LR * DECAY


def outside(point: Tensor) -> Tensor:
    """By how much each element is out of the box."""
    return (point.abs() - RADIUS).clamp(min=0)


def check_shrinking(before: Tensor, after: Tensor, tight: bool) -> None:
    """`|x'| <= (1 - lr*wd)*|x| + lr`, since no vote says more than 1; with equality if everybody votes outwards.

    Four roundings, each of at most half a unit in the last place of the largest number.
    """
    rounding = 2 * EPSILON * (before.abs() + RADIUS)
    there, here = outside(before), outside(after)
    assert (here <= SHRINK * there + rounding).all()
    for norm in (1.0, 2.0, float("inf")):
        assert here.norm(norm) <= SHRINK * there.norm(norm) + rounding.norm(norm)
    if tight:
        far = there > 0
        assert ((here - SHRINK * there).abs() <= rounding)[far].all()


def far_away() -> Tensor:
    """Half of the elements in the box, the others up to four times as far."""
    return RADIUS * torch.linspace(-4, 4, 129, dtype=torch.float64)


def box(vote: str, workers: int, sabotage: Sabotage, tight: bool) -> None:
    steps = Lockstep(far_away(), workers, sabotage(lion(vote, workers)), lr=LR, weight_decay=DECAY)
    for step in range(STEPS):
        before = steps.point.clone()
        outwards = -before.sign() if tight else 0.0 * before
        steps.step([outwards + (0.0 if tight else 1.0) * normal(100 * step + rank, 129) for rank in range(workers)])
        check_shrinking(before, steps.point, tight)
    furthest = float(far_away().abs().max())
    rounding = 2 * EPSILON * (furthest + RADIUS) / (1 - SHRINK)  # of all steps: each is shrunk by those after it
    assert float(outside(steps.point).max()) <= SHRINK**STEPS * (furthest - RADIUS) + rounding


@pytest.mark.parametrize("tight", [False, True], ids=["random", "outwards"])
@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("vote", VOTES)
def test_the_box_draws_near_and_is_never_left(vote: str, workers: int, tight: bool) -> None:
    box(vote, workers, honest, tight)


@pytest.mark.parametrize("vote", VOTES)
def test_the_box_in_a_real_world(vote: str) -> None:
    start, gradients = far_away(), normal(3, STEPS, 3, 129)
    for points in real_world(start, gradients, vote, lr=LR, weight_decay=DECAY):
        for before, after in zip([start, *points], points, strict=False):
            check_shrinking(before, after, False)


@pytest.mark.parametrize(
    ("vote", "sabotage"),
    [
        *((vote, partial(being, how)) for vote in VOTES for how in (Undecayed, DecayedInGradient, DecayedLate)),
        ("average", partial(reading, Summed)),
    ],
)
def test_a_wrong_rule_misses_the_box(vote: str, sabotage: Sabotage) -> None:
    with pytest.raises(AssertionError):
        box(vote, 3, sabotage, True)


# Theorems 3.6 and 3.8 at a point that stays: noise of workers is voted away by a majority and not by an average.

ELEMENTS = 2**14
CROWDS = (1, 4, 25, 124, 625)
SLOPE = 0.25  # gradient over standard deviation of a worker's message
SIGMAS = 5


def right() -> float:
    """Probability that a worker votes for the sign of the true gradient."""
    return (1 + erf(SLOPE / sqrt(2))) / 2


def overruled(workers: int) -> float:
    """Probability that the majority is wrong; in a tie one of the workers decides, who is right in half of them."""

    def chance(k: int) -> float:
        ways = lgamma(workers + 1) - lgamma(k + 1) - lgamma(workers - k + 1)
        return exp(ways + k * log(right()) + (workers - k) * log(1 - right()))

    return sum(chance(k) for k in range((workers + 1) // 2)) + (chance(workers // 2) / 2 if workers % 2 == 0 else 0.0)


def votes_at_rest(vote: str, workers: int, sabotage: Sabotage, common: bool = False) -> Tensor:
    """How far each verdict agrees with the sign of the true gradient, -1 to 1, at a point that has not moved for long.

    A gradient of noise 1 has then given momentum a variance of (1-b2)/(1+b2), and the message one of
    b1**2 * (1-b2)/(1+b2) + (1-b1)**2. The rate is 1 and the point 0, so the step is the verdict.

    Args:
        common: all workers have the same noise.
    """
    b1, b2 = 0.9, 0.99
    resting = (1 - b2) / (1 + b2)
    truth = SLOPE * sqrt(b1**2 * resting + (1 - b1) ** 2) * normal(4, ELEMENTS).float().sign()
    run = Lockstep(torch.zeros_like(truth), workers, sabotage(lion(vote, workers)), lr=1.0, weight_decay=0.0)
    gradients = []
    for rank, momentum in enumerate(run.momenta):
        generator = torch.Generator().manual_seed(5 if common else 5 + rank)
        noise = torch.randn((2, ELEMENTS), generator=generator)
        momentum.copy_(truth + sqrt(resting) * noise[0])
        gradients.append(truth + noise[1])
    run.step(gradients)
    return -run.point * truth.sign()


def check_majority(sabotage: Sabotage, common: bool = False) -> None:
    distances = []
    for workers in CROWDS:
        wrong = overruled(workers)
        distances.append(float((1 - votes_at_rest("majority", workers, sabotage, common)).mean()))
        margin = SIGMAS * sqrt(wrong * (1 - wrong) / ELEMENTS) + 3 / ELEMENTS  # and the few of a rare event
        assert abs(distances[-1] - 2 * wrong) <= 2 * margin
    assert distances == sorted(distances, reverse=True) and distances[-1] < 1e-3 < 0.5 < distances[0]


def check_average(sabotage: Sabotage, common: bool = False) -> None:
    for workers in CROWDS:
        agreed = votes_at_rest("average", workers, sabotage, common)
        variance = 4 * right() * (1 - right()) / workers
        assert abs(float((1 - agreed).mean()) - 2 * (1 - right())) <= SIGMAS * sqrt(variance / ELEMENTS)
        # of an estimated variance: sqrt((kurtosis - 1)/n) of it, and no sum of votes has a kurtosis above 3 here
        assert abs(float(agreed.var()) / variance - 1) <= SIGMAS * sqrt(2 / ELEMENTS)


def test_a_majority_comes_to_the_sign_of_the_gradient() -> None:
    check_majority(honest)


def test_an_average_does_not_but_settles() -> None:
    check_average(honest)


@pytest.mark.parametrize("check", [check_majority, check_average])
def test_noise_that_all_share_stays(check: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        check(honest, common=True)


@pytest.mark.parametrize(
    ("check", "sabotage"),
    [
        (check_majority, partial(counting, FirstVoter)),
        (check_majority, partial(reading, Inverted)),
        (check_average, partial(counting, FirstVoter)),
        (check_average, partial(reading, Signed)),
        (check_average, partial(reading, Summed)),
    ],
)
def test_a_wrong_vote_is_noticed(check: Callable[..., None], sabotage: Sabotage) -> None:
    with pytest.raises(AssertionError):
        check(sabotage)
