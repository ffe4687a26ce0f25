"""Gradient scalers of fp16 training, each worker with its own scale: who overflows rests, and nobody waits for it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from world import succeed, world

from dlion import Distributed
from dlion.methods import METHODS
from dlion.simulate import Simulation

WORKERS, STEPS, LR = 3, 5, 0.01
OVERFLOWS = (0, 2, 3)
OPTIONS: list[dict[str, Any]] = [
    *({"method": method} for method in METHODS),
    {"kernels": "reference", "bucket_bytes": 16},
    {"nonfinite": "skip", "bucket_bytes": 16},
    {"nonfinite": "raise", "bucket_bytes": 16},
    {"zeros": "exact", "topology": "server"},
]


def ids(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.values = nn.ParameterList(
            [torch.randn(shape, generator=generator).to(dtype) for shape in ((30, 5), (70,), ())]
        )

    def loss(self, rank: int, step: int) -> Tensor:
        """Its gradients are noise."""
        noise = torch.Generator().manual_seed(100 * step + rank)
        return sum(
            ((torch.randn(p.shape, generator=noise).to(p.dtype) * p).sum() for p in self.values), torch.zeros(())
        )


def result(model: nn.Module, optimizer: Distributed) -> Any:
    """Parameters and all state."""
    state = [{k: torch.as_tensor(v).clone() for k, v in each.items()} for each in optimizer.state.values()]
    return [param.detach().clone() for param in model.parameters()], state


def equal(these: Any, those: Any) -> bool:
    if isinstance(these, Tensor):
        return torch.equal(these, those)
    if isinstance(these, dict):
        return these.keys() == those.keys() and all(equal(these[name], those[name]) for name in these)
    return len(these) == len(those) and all(map(equal, these, those))


def backward(model: Net, scaler: GradScaler, rank: int, step: int) -> None:
    """Rank 1 overflows in some steps."""
    model.zero_grad()
    loss = scaler.scale(model.loss(rank, step))
    (loss * torch.inf if rank == 1 and step in OVERFLOWS else loss).backward()


def scaled(rank: int, group: Any, unscale: bool, **options: Any) -> Any:
    """Train under a scaler; what it ends with, after each step, and the statistics and the scale."""
    model, scaler = Net(), GradScaler("cpu", init_scale=2.0 ** (8 + rank), growth_interval=2)
    optimizer = Distributed(model.parameters(), lr=LR, process_group=group, **options)
    results = []
    for step in range(STEPS):
        backward(model, scaler, rank, step)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        results.append(result(model, optimizer))
    return results, optimizer.stats, scaler.get_scale()


def plain(rank: int, group: Any, **options: Any) -> Any:
    """The same without a scaler: NaN where it overflows."""
    model = Net()
    optimizer = Distributed(model.parameters(), lr=LR, process_group=group, **options)
    results = []
    for step in range(STEPS):
        model.zero_grad()
        model.loss(rank, step).backward()
        for param in model.parameters():
            if rank == 1 and step in OVERFLOWS:
                param.grad.fill_(torch.nan)
        optimizer.step()
        results.append(result(model, optimizer))
    return results, optimizer.stats


@pytest.mark.wide(4)
@pytest.mark.parametrize("unscale", [False, True], ids=["inside", "before"])
@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_scales_leave_no_trace_and_who_overflows_rests(options: dict[str, Any], unscale: bool) -> None:
    """Scales are powers of two, so that unscaled gradients are exact."""
    found = succeed(world(WORKERS, lambda r, g: scaled(r, g, unscale, **options)))
    wanted = succeed(world(WORKERS, lambda r, g: plain(r, g, **options | {"nonfinite": "abstain"})))
    for (results, stats, _), (others, other_stats) in zip(found, wanted, strict=True):
        assert equal(results, others)
        assert stats == other_stats and stats.abstentions % len(OVERFLOWS) == 0 and stats.skipped == 0
        assert equal(results[-1][0], found[0][0][-1][0])
    scales = [scale for _, _, scale in found]
    assert scales == [2.0**10, 2.0**6, 2.0**12]  # two steps without overflow double one, each overflow halves it


def test_a_worker_without_gradients_votes_as_without_a_scaler() -> None:
    """Then the scaler has found nothing, and says so by a number that is no tensor."""

    def work(rank: int, group: Any, scale: bool) -> Any:
        model, scaler = Net(), GradScaler("cpu", init_scale=2.0**8, enabled=scale)
        optimizer = Distributed(model.parameters(), lr=LR, process_group=group)
        loss = scaler.scale(model.loss(rank, 0))
        if rank != 1:
            loss.backward()
        scaler.step(optimizer)
        return result(model, optimizer)

    with_scaler = succeed(world(WORKERS, lambda r, g: work(r, g, True)))
    assert equal(with_scaler, succeed(world(WORKERS, lambda r, g: work(r, g, False))))


@pytest.mark.parametrize("explicit", [False, True], ids=["inside", "before"])
def test_a_sharded_scaler_rests_alone_or_where_it_unscales_first_with_everybody(explicit: bool) -> None:
    def work(rank: int, group: Any) -> Any:
        model = Net()
        scaler = ShardedGradScaler("cpu", init_scale=2.0**8, process_group=group)
        optimizer = Distributed(model.parameters(), lr=LR, process_group=group)
        for step in range(STEPS):
            backward(model, scaler, rank, step)
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return result(model, optimizer)[0], optimizer.stats, scaler.get_scale(), optimizer.param_groups[0]["t"]

    found = succeed(world(WORKERS, work))
    alone = succeed(world(WORKERS, lambda r, g: scaled(r, g, explicit)))
    for params, stats, _, t in found:
        assert equal(params, found[0][0])
        assert equal(params, alone[0][0][-1][0]) != explicit
        assert (stats.skipped, t) == ((3, 2) if explicit else (0, 5))
        assert stats.abstentions == (3 * WORKERS if explicit else 3)
    assert [scale for _, _, scale, _ in found] == ([2.0**5] * 3 if explicit else [2.0**8, 2.0**5, 2.0**8])


class Mixed(nn.Module):
    """A small network in float16 autocast: its gradients overflow where the scale is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 4))

    def loss(self, rank: int, step: int) -> Tensor:
        noise = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(8, 16, generator=noise)
        with torch.autocast("cpu", torch.float16):
            outputs: Tensor = self.layers(inputs)
        return nn.functional.mse_loss(outputs.float(), inputs[:, :4])


def test_fifty_overflows_in_a_row_on_one_worker_and_then_training_goes_on() -> None:
    steps = 120

    begun = Mixed()  # ranks are threads, and they share the generator that it draws from

    def work(rank: int, group: Any) -> Any:
        model = copy.deepcopy(begun)
        scaler = GradScaler("cpu", init_scale=2.0 ** (78 if rank == 1 else 10), growth_interval=10**6)
        optimizer = Distributed(model.parameters(), lr=2e-3, process_group=group)
        rested, losses, voters = 0, [], []
        for step in range(steps):
            optimizer.zero_grad()
            loss = model.loss(rank, step)
            scaler.scale(loss).backward()
            before, momentum = scaler.get_scale(), [s["exp_avg"].clone() for s in optimizer.state.values()]
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
            voters.append(optimizer.stats.abstentions)
            if scaler.get_scale() < before:
                rested += 1
                assert rested == step + 1, "all overflows come in a row"
                kept = [s["exp_avg"] for s in optimizer.state.values()]
                assert all(map(torch.equal, momentum, kept)) if momentum else not any(m.any() for m in kept)
        return result(model, optimizer)[0], rested, losses, voters, optimizer.param_groups[0]["t"]

    found = succeed(world(WORKERS, work))
    overflows = found[1][1]
    assert overflows >= 50 and found[0][1] == found[2][1] == 0
    for params, _, losses, abstained, t in found:
        assert equal(params, found[0][0]) and t == steps
        assert all(param.isfinite().all() for param in params)
        assert abstained == [min(step + 1, overflows) for step in range(steps)]
        first, middle, last = (sum(losses[at : at + 10]) for at in (0, overflows, steps - 10))
        assert last < 0.9 * middle < 0.9 * first


@pytest.mark.parametrize("method", ["dlion-mavo", "g-adamw"])
def test_clipping_after_an_overflow_was_found_changes_nothing(method: str) -> None:
    """Clipping turns finite gradients beside an infinite one to zeros, and those must not be voted with."""

    def work(rank: int, group: Any, clip: bool) -> Any:
        model, scaler = Net(), GradScaler("cpu", init_scale=2.0**8)
        optimizer = Distributed(model.parameters(), method, lr=LR, process_group=group)
        for step in range(STEPS):
            model.zero_grad()
            scaler.scale(model.loss(rank, step)).backward()
            if rank == 1 and step in OVERFLOWS:
                model.values[1].grad[3] = torch.inf
            scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
                if rank == 1 and step in OVERFLOWS:
                    assert not model.values[0].grad.any()
            scaler.step(optimizer)
            scaler.update()
        return result(model, optimizer), optimizer.stats

    clipped = succeed(world(WORKERS, lambda r, g: work(r, g, True)))
    assert equal([r for r, _ in clipped], [r for r, _ in succeed(world(WORKERS, lambda r, g: work(r, g, False)))])
    assert all(stats.abstentions == 3 for _, stats in clipped)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_gradients_are_unscaled_in_their_own_dtype(dtype: torch.dtype) -> None:
    def work(rank: int, group: Any, scale: float | None) -> Any:
        model = Net(dtype)
        scaler = GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        optimizer = Distributed(model.parameters(), lr=LR, process_group=group)
        for step in range(STEPS):
            model.zero_grad()
            scaler.scale(model.loss(rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        return result(model, optimizer)

    with_scales = succeed(world(2, lambda r, g: work(r, g, 2.0 ** (3 + r))))
    assert equal(with_scales, succeed(world(2, lambda r, g: work(r, g, None))))


@pytest.mark.wide(5)
@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_simulated_workers_have_scalers_of_their_own(options: dict[str, Any]) -> None:
    model = Net()
    simulation = Simulation(model, lr=LR, workers=WORKERS, **options)
    scalers = [GradScaler("cpu", init_scale=2.0 ** (8 + rank), growth_interval=2) for rank in range(WORKERS)]
    for step in range(STEPS):
        for rank, scaler in enumerate(scalers):
            with simulation.worker(rank):
                backward(model, scaler, rank, step)
                scaler.step(simulation)
                scaler.update()
        simulation.step()
    real = succeed(world(WORKERS, lambda r, g: scaled(r, g, False, **options)))
    assert equal(result(model, simulation)[0], real[0][0][-1][0])
    assert simulation.stats.abstentions == real[0][1].abstentions
    for rank in range(WORKERS):
        own = simulation.state_dict(rank)["state"].values()
        assert equal([{k: torch.as_tensor(v) for k, v in each.items()} for each in own], real[rank][0][-1][1])


def test_one_scaler_for_all_simulated_workers_is_refused_by_name() -> None:
    model, scaler = Net(), GradScaler("cpu", init_scale=2.0)
    simulation = Simulation(model, workers=2)
    for rank in range(2):
        with simulation.worker(rank):
            scaler.scale(model.loss(rank, 0)).backward()
    with pytest.raises(ValueError, match=r"call `scalers\[rank\].step\(simulation\)` inside"):
        scaler.step(simulation)
