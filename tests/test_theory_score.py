"""Theorems 3.6 and 3.8 (arXiv 2404.00438) without noise, or with bounded noise: the mean KKT score falls.

The bound that it is held to is derived here, and rules that are wrong do not keep it. Steps are in float32, for which
kernels are.
"""

from functools import partial
from math import sqrt

import pytest
import torch
from lockstep import Lockstep, lion
from sabotage import Deaf, DecayedTwice, Inverted, Sabotage, Undecayed, being, honest, reading
from torch import Tensor


class Bowl:
    """Convex: `sum a/2 * (x - c)**2`, half of the minima in the box and half of them not."""

    decay = 1.0
    curvature = torch.tensor([0.5, 1.0, 1.5, 2.0] * 2, dtype=torch.float64)
    centre = torch.tensor([0.5, -1.5] * 4, dtype=torch.float64)
    smoothness = 2.0
    start = torch.tensor([-0.9, 0.9, 0.1, 0.4, -0.3, 0.8, -0.6, 0.2], dtype=torch.float64)
    least = 0.0

    def value(self, x: Tensor) -> float:
        return float((self.curvature * (x - self.centre).square()).sum() / 2)

    def gradient(self, x: Tensor) -> Tensor:
        return self.curvature * (x - self.centre)


class Wells:
    """Not convex: two wells in each direction, `(x**2 - w**2)**2 / 4`, neighbours coupled by `x*y/10`, and the wider
    wells tilted so much that they have no top: a rule that climbs does not come to rest there.

    In the box |x| <= 0.8 the second derivative lies between -w**2 and 3*0.64 - w**2, and coupling adds at most 0.2.
    """

    decay = 1.25
    well = torch.tensor([0.4, 1.0] * 4, dtype=torch.float64)
    tilt = torch.tensor([0.0, 0.6, 0.0, -0.6] * 2, dtype=torch.float64)
    smoothness = max(1.0, 3 * 0.64 - 0.16) + 0.2
    start = Bowl.start * 0.5
    least = -0.8 * (8 * 0.1 * 0.8 + 4 * 0.6)

    def value(self, x: Tensor) -> float:
        wells = (x.square() - self.well.square()).square() / 4
        return float((wells + x * x.roll(1) / 10 + self.tilt * x).sum())

    def gradient(self, x: Tensor) -> Tensor:
        return x * (x.square() - self.well.square()) + (x.roll(1) + x.roll(-1)) / 10 + self.tilt


Problem = Bowl | Wells
BETAS = (0.5, 0.8)
HORIZONS = (80, 320, 1280)
ROUNDED = 8 * 2 * 2.0 * 2.0**-24  # 8 elements, gradients of at most 2, a unit in the last place of |wd*x| <= 1


def bound(problem: Problem, lr: float, steps: int, noise: float) -> float:
    """Of the mean score over the steps, in d dimensions, with L the smoothness and b1, b2 the betas:

        (f(x0) - min f)/(T*lr) + 2*b1*sqrt(d)*|g(x0)|/(T*(1-b2)) + 4*b1*L*lr*d/(1-b2) + 2*L*lr*d + 2*d*noise

    In the box an element moves by at most 2*lr, so f falls by lr*S in each step but for L/2*(2*lr)**2*d, and for votes
    against the gradient. A worker votes against it only where |g| is below the error of its message, which is b1 times
    that of its momentum plus noise. Without noise the momentum's error is b2 times the last one (at first g(x0)) plus
    at most 2*L*lr*sqrt(d), by which the gradient changed.
    """
    (b1, b2), d = BETAS, problem.start.numel()
    begun = 2 * b1 * sqrt(d) * float(problem.gradient(problem.start).norm()) / (steps * (1 - b2))
    lagging = 4 * b1 * problem.smoothness * lr * d / (1 - b2)
    fallen = (problem.value(problem.start) - problem.least) / (steps * lr)
    return fallen + begun + lagging + 2 * problem.smoothness * lr * d + 2 * d * noise


def mean_score(problem: Problem, vote: str, sabotage: Sabotage, steps: int, noise: float) -> float:
    """S(x) = <g, sign(g) + wd*x> is not negative in the box, and 0 only at a KKT point of min f in the box.

    The mean is over so many steps of 4 workers, whose gradients err by up to `noise`; the rate goes with 1/sqrt(T).
    """
    lr, workers = 0.18 / sqrt(steps), 4
    hyper = {"lr": lr, "weight_decay": problem.decay, "betas": BETAS}
    run = Lockstep(problem.start.float(), workers, sabotage(lion(vote, workers)), **hyper)
    draws = torch.rand((steps, workers, 8), generator=torch.Generator().manual_seed(steps))
    total = 0.0
    for errors in noise * (2 * draws - 1):
        point = run.point.double()
        gradient = problem.gradient(point)
        now = float(gradient @ (gradient.sign() + problem.decay * point))
        assert now >= -ROUNDED  # it is negative outside the box
        total += now / steps
        run.step(list(gradient.float() + errors))
    return total


def falling_score(problem: Problem, vote: str, sabotage: Sabotage, noise: float) -> None:
    found = []
    for steps in HORIZONS:
        found.append(mean_score(problem, vote, sabotage, steps, noise))
        assert found[-1] <= bound(problem, 0.18 / sqrt(steps), steps, noise)
    assert found == sorted(found, reverse=True)


@pytest.mark.wide(4)
@pytest.mark.parametrize(("vote", "noise"), [("majority", 0.0), ("majority", 0.02), ("average", 0.02)])
@pytest.mark.parametrize("problem", [Bowl(), Wells()], ids=["convex", "not convex"])
def test_the_kkt_score_falls(problem: Problem, vote: str, noise: float) -> None:
    falling_score(problem, vote, honest, noise)


@pytest.mark.wide(3)
@pytest.mark.parametrize(
    "sabotage",
    [partial(reading, Inverted), partial(being, Deaf), partial(being, DecayedTwice), partial(being, Undecayed)],
    ids=["inverted", "deaf", "decayed twice", "undecayed"],
)
@pytest.mark.parametrize("problem", [Bowl(), Wells()], ids=["convex", "not convex"])
def test_with_a_wrong_rule_the_score_does_not_fall(problem: Problem, sabotage: Sabotage) -> None:
    with pytest.raises(AssertionError):
        falling_score(problem, "majority", sabotage, 0.0)
