"""Distributed Lion element by element in plain loops, written from the paper's Algorithm 1 and the stated rules.

Slow on purpose: one number at a time, numpy float32 scalars, every product and sum rounded on its own. It knows
nothing of words, buckets, planes or shards except the number of the 64-bit word an element lies in.
"""

from dataclasses import dataclass, field

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def finaliser(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def mix64(a: int, w: int, r: int) -> int:
    first = finaliser((a + GOLDEN) & MASK)
    second = finaliser(((first ^ w) + GOLDEN) & MASK)
    return finaliser(((second ^ r) + GOLDEN) & MASK)


@dataclass
class Oracle:
    """N workers and their one common parameter vector (a list of tensors, each starting on a word)."""

    workers: int
    params: list[list[np.float32]]
    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    vote: str = "majority"
    ties: str = "rotate"
    zeros: str = "balanced"
    t: int = 0
    momenta: list[list[list[np.float32]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.momenta = [[[np.float32(0)] * len(p) for p in self.params] for _ in range(self.workers)]

    def step(self, grads: list[list[list[float] | None]]) -> None:
        """grads[worker][tensor] is a list of numbers or None. A worker with a non-finite gradient abstains."""
        voters = [
            k
            for k in range(self.workers)
            if all(np.isfinite(g) for tensor in grads[k] if tensor is not None for g in tensor)
        ]
        word = 0
        said = []
        for number, param in enumerate(self.params):
            votes = []
            for e in range(len(param)):
                votes.append(
                    [self.vote_of(k, number, e, word + e // 64, grads[k][number]) for k in range(self.workers)]
                )
            said.append((word, votes))
            word += -(-len(param) // 64)
        if not voters:
            return
        keep = np.float32(1 - self.lr * self.weight_decay)
        for param, (first, votes) in zip(self.params, said, strict=True):
            for e in range(len(param)):
                counted = [votes[e][k] for k in voters]
                step = np.float32(self.step_size(counted, first + e // 64))
                param[e] = np.float32(np.float32(param[e] * keep) - step)
        self.t += 1

    def vote_of(self, k: int, number: int, e: int, word: int, grad: list[float] | None) -> int:
        """The vote of worker k on one element: -1 or +1, or 0 where zeros are exact. Moves its momentum."""
        g = np.float32(0 if grad is None else grad[e])
        if not np.isfinite(g):
            return 1  # does not count
        message = self.message(k, number, e, g)
        if message != 0:
            return 1 if message > 0 else -1
        if self.zeros == "exact" or self.workers == 1:
            return 0
        bit = mix64(self.t // 2, word, k) >> (e % 64) & 1
        return 1 if bit ^ (self.t & 1) else -1

    def message(self, k: int, number: int, e: int, g: np.float32) -> np.float32:
        """What the sign is taken of."""
        b1, b2 = self.betas
        m = self.momenta[k][number][e]
        message = np.float32(np.float32(m * np.float32(b1)) + np.float32(g * np.float32(1 - b1)))
        moved = np.float32(np.float32(m * np.float32(b2)) + np.float32(g * np.float32(1 - b2)))
        self.momenta[k][number][e] = np.float32(0) if abs(moved) < 2.0**-126 else moved
        return message

    def step_size(self, votes: list[int], word: int) -> float:
        """lr times the verdict, in float64."""
        total = sum(votes)
        if self.vote == "average":
            return self.lr * total / len(votes)
        if total != 0:
            return self.lr * (1 if total > 0 else -1)
        if not any(votes) or self.ties == "zero":
            return 0.0
        if self.ties == "alternate":
            return self.lr * (1 if (self.t + word) % 2 == 0 else -1)
        start = self.t // 2 + word
        order = [votes[(start + k) % len(votes)] for k in range(len(votes))]
        return self.lr * next(vote for vote in order if vote)
