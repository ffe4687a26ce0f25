"""bf16 and fp16 parameters: steps below their resolution are not lost, cancel when they alternate, and are the same on
all workers and with all kernels.
"""

import pytest
import torch
from torch import nn
from world import succeed, world

from dlion import Distributed, DistributedLion
from dlion.ops import KERNELS, library

LOW = [torch.bfloat16, torch.float16]
AVAILABLE = [name for name in KERNELS if name != "triton" and (name != "native" or library.available())]  # on a CPU
ELEMENTS = 2000


def moved(
    dtype: torch.dtype, lr: float, steps: int, alternate: bool = False, rank: int = 0, **options: object
) -> torch.Tensor:
    """How far a parameter of ones has gone after `steps` with a gradient of -1, or of -1 and 1 in turn."""
    param = nn.Parameter(torch.ones(ELEMENTS, dtype=dtype))
    opt = DistributedLion([param], lr=lr, betas=(0.0, 0.0), **options)
    for step in range(steps):
        param.grad = torch.full_like(param, 1.0 if alternate and step % 2 else -1.0) * (rank + 1)
        opt.step()
    return param.detach().float() - 1


@pytest.mark.wide(3)
@pytest.mark.parametrize("kernels", AVAILABLE)
@pytest.mark.parametrize(("dtype", "lr"), [(torch.bfloat16, 1e-4), (torch.float16, 1e-5)])
def test_a_thousand_steps_below_the_resolution_add_up(dtype: torch.dtype, lr: float, kernels: str) -> None:
    resolution = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    assert lr < resolution / 50
    seen = moved(dtype, lr, 1000, kernels=kernels)
    wanted = 1000 * lr
    # A walk of steps of one resolution with the odds of lr: the deviation of one element, and of the mean of all.
    deviation = (1000 * lr * resolution) ** 0.5
    assert abs(float(seen.mean()) - wanted) < 5 * deviation / ELEMENTS**0.5
    assert float(seen.std()) < 1.2 * deviation
    assert moved(dtype, lr, 1000, rounding="nearest", kernels=kernels).abs().max() == 0


@pytest.mark.parametrize("dtype", LOW)
def test_alternating_steps_do_not_walk(dtype: torch.dtype) -> None:
    resolution = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    assert moved(dtype, resolution / 30, 1000, alternate=True).abs().max() <= resolution


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW)
def test_workers_who_agree_move_as_one_worker_alone(dtype: torch.dtype) -> None:
    """To the bit, over 1,000 steps below the resolution: so all that is said of one holds for many."""
    ways = [{"topology": "sharded"}, {"vote": "average", "topology": "replicated", "bucket_bytes": 128}]
    lr = 1e-4 if dtype == torch.bfloat16 else 1e-5

    def work(rank: int, group: object) -> list[torch.Tensor]:
        return [moved(dtype, lr, 1000, rank=rank, process_group=group, **way) for way in ways]

    alone = moved(dtype, lr, 1000)
    assert 0.9 * 1000 * lr < float(alone.mean()) < 1.1 * 1000 * lr
    for results in succeed(world(3, work)):
        assert all(torch.equal(result, alone) for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg"])
def test_alternating_steps_of_workers_do_not_walk_though_some_steps_are_lost(method: str) -> None:
    """Nobody votes in a step in three: it does not count, so that the two steps of a pair still cancel."""

    def work(rank: int, group: object) -> torch.Tensor:
        param = nn.Parameter(torch.ones(ELEMENTS, dtype=torch.bfloat16))
        opt = Distributed([param], method, lr=2.0**-7 / 30, betas=(0.0, 0.0), process_group=group)
        for step in range(900):
            up = 1.0 if opt.param_groups[0]["t"] % 2 else -1.0
            param.grad = torch.full_like(param, torch.nan if step % 3 == 1 else up * (rank + 1))
            opt.step()
        assert (opt.stats.skipped, opt.param_groups[0]["t"]) == (300, 600)
        return param.detach().float() - 1

    found = succeed(world(3, work))
    assert all(torch.equal(moves, found[0]) and moves.abs().max() <= 2.0**-7 for moves in found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg", "g-lion"])
def test_replicas_and_kernels_round_alike(method: str, dtype: torch.dtype) -> None:
    """1,000 steps on three workers with different gradients."""

    def work(rank: int, group: object, kernels: str) -> torch.Tensor:
        param = nn.Parameter(torch.linspace(-2, 2, 130).to(dtype))
        opt = Distributed([param], method, lr=1e-4, weight_decay=0.1, process_group=group, kernels=kernels)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(1000 if kernels == "auto" else 100):
            param.grad = torch.randint(-3, 4, (130,), generator=generator).to(dtype)
            opt.step()
        return param.detach()

    long = succeed(world(3, lambda r, g: work(r, g, "auto")))
    assert all(torch.equal(param, long[0]) for param in long)
    short = [succeed(world(3, lambda r, g, k=k: work(r, g, k)))[0] for k in AVAILABLE if k != "auto"]
    assert all(torch.equal(param, short[0]) for param in short)


def test_the_bits_of_votes_do_not_depend_on_buckets() -> None:
    def work(rank: int, group: object, bucket_bytes: int) -> torch.Tensor:
        return moved(torch.bfloat16, 1e-3, 20, rank=rank, process_group=group, bucket_bytes=bucket_bytes)

    cut, whole = (succeed(world(2, lambda r, g, n=n: work(r, g, n)))[0] for n in (64, 2**20))
    assert torch.equal(cut, whole)


def test_rounding_has_a_meaning_where_dlion_rounds() -> None:
    param = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="rounding='up' is not known: choose one of stochastic, nearest"):
        DistributedLion([param], rounding="up")
    with pytest.raises(ValueError, match="rounding='nearest' has no meaning with method='g-adamw'"):
        Distributed([param], "g-adamw", rounding="nearest")
