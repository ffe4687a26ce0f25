"""The optimizer against the plain-loop oracle, to the bit: every vote, tie and zero rule, any number of workers."""

import numpy as np
import pytest
import torch
from oracle import Oracle, mix64
from world import succeed, world

from dlion import DistributedLion

SHAPES = [(3, 5), (64,), (130,), ()]
STEPS = 7


def gradients(workers: int, seed: int) -> list[list[list[torch.Tensor]]]:
    """[step][worker][tensor], a third of it exactly zero, so that ties and zeros are common."""
    generator = torch.Generator().manual_seed(seed)

    def one(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randint(-2, 3, shape, generator=generator).float()
        return values * torch.rand(shape, generator=generator).round(decimals=2)

    return [[[one(shape) for shape in SHAPES] for _ in range(workers)] for _ in range(STEPS)]


def start() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def trained(workers: int, steps: list[list[list[torch.Tensor | None]]], **options: object) -> list[list[torch.Tensor]]:
    """Final parameters of every rank."""

    def work(rank: int, group: object) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(p.clone()) for p in start()]
        opt = DistributedLion(params, process_group=group, **options)
        for step in steps:
            for param, grad in zip(params, step[rank], strict=True):
                param.grad = None if grad is None else grad.clone()
            opt.step()
        return [p.detach() for p in params]

    return succeed(world(workers, work))


def expected(workers: int, steps: list[list[list[torch.Tensor | None]]], **options: object) -> list[torch.Tensor]:
    oracle = Oracle(workers, [[np.float32(x) for x in p.view(-1).tolist()] for p in start()], **options)
    for step in steps:
        oracle.step([[None if g is None else g.view(-1).tolist() for g in mine] for mine in step])
    return [torch.tensor(np.array(p)).view(shape) for p, shape in zip(oracle.params, SHAPES, strict=True)]


def same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


RULES = [
    {"vote": "majority", "ties": "rotate", "zeros": "balanced"},
    {"vote": "majority", "ties": "alternate", "zeros": "balanced"},
    {"vote": "majority", "ties": "rotate", "zeros": "exact"},
    {"vote": "majority", "ties": "alternate", "zeros": "exact"},
    {"vote": "majority", "ties": "zero", "zeros": "exact"},
    {"vote": "average", "zeros": "balanced"},
    {"vote": "average", "zeros": "exact"},
]


@pytest.mark.wide(3)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(rules.values()))
def test_equals_the_oracle(workers: int, rules: dict[str, str]) -> None:
    steps = gradients(workers, seed=workers)
    options = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.3, **rules}
    wanted = expected(workers, steps, **options)
    ranks = trained(workers, steps, **options)
    assert all(same(rank, wanted) for rank in ranks)
    assert not same(wanted, start())


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_missing_and_non_finite_gradients_equal_the_oracle(workers: int) -> None:
    steps = gradients(workers, seed=50 + workers)
    for number, step in enumerate(steps):
        step[number % workers][1] = None
        step[(number + 1) % workers][2][number] = float("nan") if number % 2 else float("inf")
    options = {"lr": 0.01, "weight_decay": 0.1}
    assert all(same(rank, expected(workers, steps, **options)) for rank in trained(workers, steps, **options))


def test_one_worker_is_plain_lion() -> None:
    """Written out once more in torch, without the oracle's classes: the form a migrating user would compare with."""
    steps = gradients(1, seed=3)
    p, m = start(), [torch.zeros(shape) for shape in SHAPES]
    for (grads,) in steps:
        for k, g in enumerate(grads):
            update = torch.sign(m[k] * 0.9 + g * (1 - 0.9))
            m[k] = m[k] * 0.99 + g * (1 - 0.99)
            p[k] = p[k] * (1 - 0.01 * 0.3) - update * 0.01
    assert same(trained(1, steps, lr=0.01, weight_decay=0.3)[0], p)


def test_oracle_hash_has_the_published_values() -> None:
    assert mix64(0, 0, 0) == 0x238275BC38FCBE91
    assert mix64(1, 2, 3) == 0xD0734750FDE362B3
    assert mix64(7, 2**33, 5) == 0xC750839175628FDE
