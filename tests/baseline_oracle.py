"""The baselines in plain loops, each written from its paper: one number at a time, every product and sum rounded.

`grads[worker][tensor]` is a list of numbers or None, `params` a list of flat tensors that all workers share, and what
is a worker's own is `own[name][worker][tensor]`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from oracle import Oracle, mix64

f = np.float32
Flat = list[np.float32]
Grads = list[list[list[float] | None]]


class SignumOracle(Oracle):
    """`betas[0]` is Signum's only beta; the sign is that of the new momentum."""

    def message(self, k: int, number: int, e: int, g: np.float32) -> np.float32:
        beta = self.betas[0]
        moved = f(f(self.momenta[k][number][e] * f(beta)) + f(g * f(1 - beta)))
        self.momenta[k][number][e] = moved
        return moved


class SignSGDOracle(Oracle):
    def message(self, k: int, number: int, e: int, g: np.float32) -> np.float32:
        return g


@dataclass
class Baseline:
    """What all the others share: who takes part, and a descent with momentum along the mean."""

    workers: int
    params: list[Flat]
    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.9
    settings: dict[str, Any] = field(default_factory=dict)
    t: int = 0
    names: tuple[str, ...] = ()
    own: dict[str, list[list[Flat]]] = field(default_factory=dict)
    buffers: list[Flat] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own = {name: [self.zeros() for _ in range(self.workers)] for name in self.names}
        self.buffers = self.zeros()

    def zeros(self) -> list[Flat]:
        return [[f(0)] * len(p) for p in self.params]

    def step(self, grads: Grads) -> None:
        filled = [
            [[f(0)] * len(p) if g is None else [f(x) for x in g] for p, g in zip(self.params, mine, strict=True)]
            for mine in grads
        ]
        voters = [k for k in range(self.workers) if all(np.isfinite(x) for tensor in filled[k] for x in tensor)]
        if voters:
            self.descend(self.mean(filled, voters))
            self.t += 1

    def mean(self, grads: list[list[Flat]], voters: list[int]) -> list[Flat]:
        raise NotImplementedError

    def descend(self, mean: list[Flat]) -> None:
        for number, param in enumerate(self.params):
            for e, g in enumerate(mean[number]):
                self.buffers[number][e] = f(f(self.buffers[number][e] * f(self.momentum)) + g)
                self.move(param, e, f(self.buffers[number][e] * f(self.lr)))

    def move(self, param: Flat, e: int, step: np.float32) -> None:
        param[e] = f(f(param[e] * f(1 - self.lr * self.weight_decay)) - step)


class TernGradOracle(Baseline):
    """1705.07878: clip to 2.5 standard deviations, share the largest scale, round to three values at random."""

    def mean(self, grads: list[list[Flat]], voters: list[int]) -> list[Flat]:
        mean, word = [], 0
        for number, param in enumerate(self.params):
            bounds = [self.bound(grads[k][number]) for k in range(self.workers)]
            shared = max(bounds)
            means = []
            for e in range(len(param)):
                total = 0
                for k in voters:
                    clipped = min(max(float(grads[k][number][e]), -float(bounds[k])), float(bounds[k]))
                    lot = self.lot(k, 64 * word + e)
                    if shared > 0 and lot < abs(clipped) / float(shared):
                        total += 1 if clipped > 0 else -1
                means.append(f(f(total / len(voters)) * shared))
            mean.append(means)
            word += -(-len(param) // 64)
        return mean

    def bound(self, grad: Flat) -> np.float32:
        if not grad or not all(np.isfinite(x) for x in grad):
            return f(0)
        center = math.fsum(map(float, grad)) / len(grad)
        deviation = math.sqrt(math.fsum((float(x) - center) ** 2 for x in grad) / len(grad))
        return f(self.settings["clip"] * deviation or max(abs(float(x)) for x in grad))

    def lot(self, rank: int, element: int) -> float:
        half = mix64(mix64(self.settings["seed"], self.t, 0), element // 2, rank) >> 32 * (element % 2) & (2**32 - 1)
        return (half - 2**32 if half >= 2**31 else half) / 2**32 + 0.5


class GradDropOracle(Baseline):
    """1704.05021: residuals grow by gradients; the largest leave them."""

    def mean(self, grads: list[list[Flat]], voters: list[int]) -> list[Flat]:
        totals = self.zeros()
        for k in voters:
            piled = self.pile_up(k, grads[k])
            for number, e in self.chosen(piled):
                totals[number][e] = f(totals[number][e] + piled[number][e])
                self.leave(k, number, e)
        return [[f(x / f(len(voters))) for x in tensor] for tensor in totals]

    def pile_up(self, k: int, grads: list[Flat]) -> list[Flat]:
        residual = self.own["residual"][k]
        for number, grad in enumerate(grads):
            residual[number] = [f(r + g) for r, g in zip(residual[number], grad, strict=True)]
        return [list(tensor) for tensor in residual]

    def leave(self, k: int, number: int, e: int) -> None:
        for name in self.names:
            self.own[name][k][number][e] = f(0)

    def counts(self) -> list[int]:
        return [math.ceil(self.keep() * len(p)) for p in self.params]

    def keep(self) -> float:
        return self.settings["keep"]

    def chosen(self, piled: list[Flat]) -> list[tuple[int, int]]:
        places = [(number, e) for number, tensor in enumerate(piled) for e in range(len(tensor))]
        places.sort(key=lambda place: -abs(piled[place[0]][place[1]]))  # stable: of equal ones the first
        if self.settings.get("threshold") == "global":
            return places[: sum(self.counts())]
        found = []
        for number, count in enumerate(self.counts()):
            found += [place for place in places if place[0] == number][:count]
        return found


class DGCOracle(GradDropOracle):
    """1712.01887: clipped gradients into momentum, momentum into what piles up, both masked where it is sent."""

    def pile_up(self, k: int, grads: list[Flat]) -> list[Flat]:
        norm = math.sqrt(math.fsum(float(x) ** 2 for tensor in grads for x in tensor))
        limit = self.settings["clip"] / math.sqrt(self.workers)
        for number, grad in enumerate(grads):
            velocity, residual = self.own["velocity"][k][number], self.own["residual"][k][number]
            for e, x in enumerate(grad):
                g = f(x * f(limit / norm)) if 0 < limit < norm else x
                velocity[e] = f(f(velocity[e] * f(self.momentum)) + g)
                residual[e] = f(residual[e] + velocity[e])
        return [list(tensor) for tensor in self.own["residual"][k]]

    def keep(self) -> float:
        """Warm-up in four stages: keep^(1/5), keep^(2/5), keep^(3/5), keep^(4/5)."""
        for stage in range(1, 5):
            if self.t < self.settings["warmup"] * stage / 4:
                return self.settings["keep"] ** (stage / 5)
        return self.settings["keep"]

    def descend(self, mean: list[Flat]) -> None:
        for number, param in enumerate(self.params):
            for e, g in enumerate(mean[number]):
                self.move(param, e, f(g * f(self.lr)))


class EFSignOracle(Baseline):
    """1901.09847: p = lr*g + e, the mean magnitude of p times its sign, and the rest is e."""

    def mean(self, grads: list[list[Flat]], voters: list[int]) -> list[Flat]:
        totals = self.zeros()
        for k in voters:
            for number, grad in enumerate(grads[k]):
                error = self.own["residual"][k][number]
                wanted = [f(e + f(g * f(self.lr))) for e, g in zip(error, grad, strict=True)]
                scale = f(math.fsum(abs(float(p)) for p in wanted) / max(len(wanted), 1))
                for e, p in enumerate(wanted):
                    said = scale if p >= 0 else -scale
                    error[e] = f(p - said)
                    totals[number][e] = f(totals[number][e] + said)
        return [[f(x / f(len(voters))) for x in tensor] for tensor in totals]

    def descend(self, mean: list[Flat]) -> None:
        for number, param in enumerate(self.params):
            for e, step in enumerate(mean[number]):
                self.move(param, e, step)


class PowerSGDOracle(Baseline):
    """1905.13727, Algorithms 1 and 2, in float64: equal to rounding. `settings["q"]`: the first Q of each matrix."""

    def mean(self, grads: list[list[Flat]], voters: list[int]) -> list[Flat]:
        return [self.mean_of(number, [grads[k][number] for k in voters], voters) for number in range(len(self.params))]

    def mean_of(self, number: int, grads: list[Flat], voters: list[int]) -> Flat:
        count = len(voters)
        if number not in self.settings["q"]:
            return [f(sum(map(float, column)) / count) for column in zip(*grads, strict=True)]
        q = gram_schmidt(self.settings["q"][number])
        m = len(q)
        targets = [
            [float(e) + float(g) for e, g in zip(self.own["residual"][k][number], grad, strict=True)]
            for k, grad in zip(voters, grads, strict=True)
        ]
        n, rank = len(self.params[number]) // m, len(q[0])
        entry = [[[target[i * m + j] for j in range(m)] for i in range(n)] for target in targets]
        p = [
            [sum(sum(M[i][j] * q[j][r] for j in range(m)) for M in entry) / count for r in range(rank)]
            for i in range(n)
        ]
        p = gram_schmidt(p)
        q = [
            [sum(sum(M[i][j] * p[i][r] for i in range(n)) for M in entry) / count for r in range(rank)]
            for j in range(m)
        ]
        self.settings["q"][number] = q
        said = [sum(p[i][r] * q[j][r] for r in range(rank)) for i in range(n) for j in range(m)]
        for k, target in zip(voters, targets, strict=True):
            self.own["residual"][k][number] = [f(t - s) for t, s in zip(target, said, strict=True)]
        return [f(x) for x in said]

    def descend(self, mean: list[Flat]) -> None:
        """m = lambda*m + d; x = x - lr*(d + m)."""
        for number, param in enumerate(self.params):
            for e, d in enumerate(mean[number]):
                self.buffers[number][e] = f(f(self.buffers[number][e] * f(self.momentum)) + d)
                self.move(param, e, f(f(d + self.buffers[number][e]) * f(self.lr)))


def gram_schmidt(rows: list[list[float]]) -> list[list[float]]:
    columns = [list(column) for column in zip(*rows, strict=True)]
    for r, column in enumerate(columns):
        for before in columns[:r]:
            overlap = sum(a * b for a, b in zip(before, column, strict=True))
            column[:] = [b - overlap * a for a, b in zip(before, column, strict=True)]
        length = math.sqrt(sum(x * x for x in column))
        column[:] = [x / length for x in column]
    return [list(row) for row in zip(*columns, strict=True)]
