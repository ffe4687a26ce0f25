"""Every method, topology and number of workers: replicas stay bitwise equal, and no choice of transport moves a bit."""

import copy

import pytest
import torch
from torch import nn
from world import succeed, world

from dlion import Distributed
from dlion.methods import METHODS
from dlion.ops import library

STEPS = 4


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(17, 90), nn.Tanh(), nn.Linear(90, 7))
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator) * 0.1
    return model


MODEL = make_model()


def train(rank: int, group: object, steps: int = STEPS, **options: object) -> tuple[torch.Tensor, Distributed]:
    model = copy.deepcopy(MODEL)
    opt = Distributed(model.named_parameters(), process_group=group, **{"lr": 1e-3, **options})
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(8, 17, generator=generator)).square().mean().backward()
        opt.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), opt


@pytest.mark.wide(4)
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("method", METHODS)
def test_replicas_are_equal_and_moved(method: str, workers: int) -> None:
    ranks = succeed(world(workers, lambda rank, group: train(rank, group, method=method)))
    first = ranks[0][0]
    assert all(torch.equal(first, params) for params, _ in ranks)
    assert not torch.equal(first, torch.cat([p.detach().reshape(-1) for p in MODEL.parameters()]))
    assert ranks[0][1].stats.steps == STEPS


@pytest.mark.wide(5)
@pytest.mark.parametrize("workers", [2, 3, 6])
@pytest.mark.parametrize("zeros", ["balanced", "exact"])
@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg"])
def test_topology_and_buckets_do_not_move_a_bit(method: str, zeros: str, workers: int) -> None:
    def run(**options: object) -> torch.Tensor:
        ranks = succeed(world(workers, lambda rank, group: train(rank, group, method=method, zeros=zeros, **options)))
        return ranks[0][0]

    wanted = run()
    for topology in ("sharded", "replicated", "server"):
        assert torch.equal(run(topology=topology), wanted)
    assert torch.equal(run(topology="sharded", bucket_bytes=64), wanted)
    assert torch.equal(run(topology="server", bucket_bytes=72), wanted)


@pytest.mark.wide(5)
@pytest.mark.parametrize("workers", [2, 3, 6])
@pytest.mark.parametrize("method", ["g-lion", "g-adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_travels_like_every_ballot(method: str, workers: int, dtype: torch.dtype) -> None:
    """No topology, number of shards or cut into buckets moves a bit of a sum, not even of nearly equal terms."""

    def work(rank: int, group: object, **options: object) -> torch.Tensor:
        params = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (7, 130, 1)]
        opt = Distributed(params, method, lr=1e-2, process_group=group, **options)
        own = torch.Generator().manual_seed(rank)
        for _ in range(3):
            for param in params:
                param.grad = (-1.0) ** rank + 1e-6 * torch.randn(param.shape, generator=own, dtype=dtype)
            opt.step()
        return torch.cat([param.detach() for param in params])

    def run(**options: object) -> list[torch.Tensor]:
        return succeed(world(workers, lambda rank, group: work(rank, group, **options)))

    wanted = run()[0]
    for options in ({"topology": name} for name in ("sharded", "replicated", "server")):
        assert all(torch.equal(seen, wanted) for seen in run(**options))
    assert torch.equal(run(topology="sharded", bucket_bytes=64)[0], wanted)


@pytest.mark.wide(5)
@pytest.mark.skipif(not library.available(), reason="this installation has no native kernels")
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("zeros", ["balanced", "exact"])
@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg", "d-signum-mavo"])
def test_fused_kernels_and_the_generic_pipeline_give_the_same_bits(method: str, zeros: str, workers: int) -> None:
    def run(rank: int, group: object, kernels: str) -> tuple[list[torch.Tensor], str]:
        options = {"method": method, "zeros": zeros, "kernels": kernels, "bucket_bytes": 64, "weight_decay": 0.1}
        params, opt = train(rank, group, **options)
        steps = type(opt._renewal._steps).__name__
        return [params, *(opt.state[p]["exp_avg"] for p in opt.param_groups[0]["params"])], steps

    fused = succeed(world(workers, lambda r, g: run(r, g, "native")))
    generic = succeed(world(workers, lambda r, g: run(r, g, "reference")))
    assert {steps for _, steps in fused} == {"FusedLion"} and {steps for _, steps in generic} == {"Pipeline"}
    for (mine, _), (theirs, _) in zip(fused, generic, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_global_methods_equal_one_worker_with_the_mean_gradient() -> None:
    """Two workers whose gradients are exact in binary: their mean is exact, so one worker with it must agree."""
    for method in ("g-lion", "g-adamw"):
        grads = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.5, 1.0, -0.5])]

        def work(rank: int, group: object, method: str = method, grads: list[torch.Tensor] = grads) -> torch.Tensor:
            param = nn.Parameter(torch.ones(3))
            opt = Distributed([param], method, lr=0.1, weight_decay=0.1, process_group=group)
            for _ in range(3):
                param.grad = grads[rank].clone()
                opt.step()
                assert torch.equal(param.grad, grads[rank]), "the local gradient stays where it is"
            return param.detach()

        pair = succeed(world(2, work))
        alone = nn.Parameter(torch.ones(3))
        opt = (
            Distributed([alone], method, lr=0.1, weight_decay=0.1)
            if method == "g-lion"
            else torch.optim.AdamW([alone], lr=0.1, weight_decay=0.1)
        )
        for _ in range(3):
            alone.grad = torch.stack(grads).mean(0)
            opt.step()
        assert torch.equal(pair[0], alone.detach()) and torch.equal(pair[1], alone.detach())


def test_the_number_of_calls_does_not_depend_on_the_number_of_tensors() -> None:
    def calls(tensors: int, rank: int, group: object) -> int:
        params = [nn.Parameter(torch.ones(40)) for _ in range(tensors)]
        opt = Distributed(params, topology="sharded", process_group=group)
        for param in params:
            param.grad = torch.ones(40) * (rank + 1)
        opt.step()
        return opt.stats.calls

    counts = [succeed(world(3, lambda r, g, n=n: calls(n, r, g))) for n in (1, 1000)]
    assert counts == [[2, 2, 2], [2, 2, 2]]
