"""Models of several workers: local gradients under DDP, equal starts without it, buffers, the averaging guard."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from world import succeed, world

from dlion import DistributedLion, local_gradients, synchronize_buffers
from dlion.errors import AgreementError

INPUTS = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(3))
MODEL = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


class Odd(nn.Module):
    """Parameters and buffers of every kind; rank 0's hold other values than the others'."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
            name = str(dtype).replace("torch.", "w_")
            values = torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype)
            self.register_parameter(name, nn.Parameter(values))
            self.register_parameter(f"{name}_across", nn.Parameter(values.clone().t()))
            self.register_buffer(f"{name}_buffer", values * 2)
        self.scalar = nn.Parameter(torch.tensor(float(rank)))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.slice = nn.Parameter(torch.full((9,), float(rank))[1:8:2])
        self.frozen = nn.Parameter(torch.full((3,), float(rank)), requires_grad=False)
        self.tied = self.scalar
        self.register_buffer("flags", torch.tensor([rank == 0, True, rank != 0]))
        self.register_buffer("counts", torch.tensor([rank, 2**40 + rank]))
        self.register_buffer("byte", torch.tensor(rank, dtype=torch.uint8))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("expanded", torch.full((2, 1), float(rank)).expand(2, 5))
        self.register_buffer("expanded_counts", torch.full((1, 3), rank).expand(4, 3))
        self.register_buffer("hidden", torch.full((2,), float(rank)), persistent=False)
        self.image = nn.Parameter(
            torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last), requires_grad=True
        )


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ---- models without DDP


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_bare_model_takes_rank_zeros_values_whatever_they_are(workers: int) -> None:
    models = [Odd(rank) for rank in range(workers)]
    strides = {name: t.stride() for name, t in tensors(models[0]).items()}

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = models[rank]
        addresses = {name: t.data_ptr() for name, t in tensors(model).items()}
        assert local_gradients(model, group) is model
        assert {name: t.data_ptr() for name, t in tensors(model).items()} == addresses
        assert {name: t.stride() for name, t in tensors(model).items()} == strides
        assert model.tied is model.scalar

    wanted = {name: t.clone() for name, t in tensors(models[0]).items()}
    succeed(world(workers, work))
    for model in models:
        assert all(torch.equal(t, wanted[name]) for name, t in tensors(model).items())


MISFITS: list[tuple[str, Callable[[nn.Module], Any]]] = [
    ("shape", lambda m: m.register_parameter("frozen", nn.Parameter(torch.zeros(4)))),
    ("dtype", lambda m: m.register_parameter("frozen", nn.Parameter(torch.zeros(3, dtype=torch.float64)))),
    ("name", lambda m: m.register_parameter("another", nn.Parameter(torch.zeros(3)))),
    ("buffer", lambda m: m.register_buffer("counts", torch.zeros(3, dtype=torch.int64))),
    ("missing", lambda m: delattr(m, "image")),
    ("nothing at all", lambda m: (m._parameters.clear(), m._buffers.clear())),
]


@pytest.mark.parametrize("odd_one", [0, 1, 2])
@pytest.mark.parametrize("change", [f for _, f in MISFITS], ids=[name for name, _ in MISFITS])
def test_models_that_differ_are_an_error_on_every_rank(change: Callable[[nn.Module], Any], odd_one: int) -> None:
    models = [Odd(rank) for rank in range(3)]
    change(models[odd_one])
    before = [{name: t.clone() for name, t in tensors(model).items()} for model in models]

    errors = world(3, lambda rank, group: local_gradients(models[rank], group))
    # rank 0 is the reference: if it is the odd one, the first other is named
    assert all(isinstance(error, AgreementError) for error in errors), errors
    assert all(f"rank {odd_one or 1} has" in str(error) for error in errors)
    for model, old in zip(models, before, strict=True):
        assert all(torch.equal(t, old[name]) for name, t in tensors(model).items())


@pytest.mark.parametrize("odd_one", [0, 1])
def test_buffers_that_differ_are_an_error_on_every_rank(odd_one: int) -> None:
    models = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    models[odd_one] = nn.BatchNorm1d(3, track_running_stats=False)  # which has no buffers
    for error in world(2, lambda rank, group: synchronize_buffers(models[rank], group)):
        assert isinstance(error, AgreementError) and "rank 1 has" in str(error)


def test_buffers_become_the_mean_and_counters_rank_zeros() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        model = Odd(rank)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert synchronize_buffers(model, group) is model
        assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
        return dict(model.named_buffers())

    ranks = succeed(world(3, work))
    assert all(torch.equal(t, ranks[0][name]) for buffers in ranks for name, t in buffers.items())
    originals = [dict(Odd(rank).named_buffers()) for rank in range(3)]
    for name, got in ranks[0].items():
        if not got.is_floating_point() and not got.is_complex():
            assert torch.equal(got, originals[0][name]), name
        elif got.numel():
            wide = torch.complex128 if got.is_complex() else torch.float64
            mean = torch.stack([buffers[name].to(wide) for buffers in originals]).mean(0)
            assert torch.allclose(got.to(wide), mean, atol=2 * torch.finfo(got.dtype).eps, rtol=1e-2), name
    assert torch.equal(ranks[0]["hidden"], torch.ones(2))


def test_batch_norm_trains_apart_and_is_evaluated_together() -> None:
    start = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))

    def work(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = local_gradients(copy.deepcopy(start), group)
        optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)
        for k in range(3 + rank):
            if k < 3:
                optimizer.zero_grad()
                model(INPUTS[rank] + k).square().mean().backward()
                optimizer.step()
            else:
                model(INPUTS[rank])  # an uneven number of batches: counters differ
        own = model[1].running_mean.clone()
        synchronize_buffers(model, group)
        assert model[1].num_batches_tracked.item() == 3
        return own, model[1].running_mean.clone(), model.eval()(INPUTS[3]).detach()

    (a, mean, out), (b, mean_b, out_b) = succeed(world(2, work))
    assert not torch.equal(a, b) and torch.equal(mean, mean_b) and torch.equal(out, out_b)
    assert torch.equal(mean, (a + b) / 2)


# ---- DDP


def ddp(group: dist.ProcessGroup, model: nn.Module = MODEL, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(copy.deepcopy(model), process_group=group, **options)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def backward(model: nn.Module, rank: int, step: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    model(INPUTS[rank] + step).square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_under_ddp_gradients_are_those_of_the_bare_model(options: dict[str, Any]) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model = ddp(group, **options)
        assert local_gradients(local_gradients(model)) is model  # twice is harmless
        optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)
        for step in range(4):
            bare = copy.deepcopy(model.module)
            got, wanted = backward(model, rank, step), backward(bare, rank, step)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
            optimizer.step()
        return flat(model)

    a, b = succeed(world(2, work))
    assert torch.equal(a, b)


def test_a_module_with_another_hook_is_refused() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = ddp(group)
        model.register_comm_hook(group, default_hooks.allreduce_hook)
        with pytest.raises(ValueError, match="communication hook already"):
            local_gradients(model)

    succeed(world(2, work))


def test_micro_batches_add_up_and_clipping_is_each_workers_own() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, float]:
        model, bare = local_gradients(ddp(group)), copy.deepcopy(MODEL)
        optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)
        for part in (INPUTS[rank][:2], INPUTS[rank][2:]):
            model(part).square().sum().backward()
            bare(part).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm == nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(bare), strict=True))
        optimizer.step()
        return flat(model), norm.item()

    (a, norm_a), (b, norm_b) = succeed(world(2, work))
    assert torch.equal(a, b) and norm_a != norm_b


def test_tied_weights_move_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.out.weight = self.table.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(tokens))

    start = Tied()

    def work(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model = local_gradients(copy.deepcopy(start), group)
        optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)
        model(torch.tensor([rank, 3, 6])).square().mean().backward()
        optimizer.step()
        assert model.out.weight is model.table.weight
        return flat(model)

    a, b = succeed(world(2, work))
    assert torch.equal(a, b) and not torch.equal(a, flat(start))


@pytest.mark.parametrize("workers", [3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_buffers_that_are_equal_stay_to_the_bit(workers: int, dtype: torch.dtype) -> None:
    """A mask of the lowest number there is would become minus infinity as a sum, a table would move by an ulp."""
    table = 1.0 / 10000 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    wanted = [torch.full((5,), torch.finfo(dtype).min, dtype=dtype), table.to(dtype), torch.tensor(float("inf"))]

    def work(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = nn.Module()
        for number, buffer in enumerate(wanted):
            model.register_buffer(f"equal{number}", buffer.clone())
        model.register_buffer("own", torch.tensor([1.0, float(rank)]))
        synchronize_buffers(model, group)
        return list(model.buffers())

    for *equal, own in succeed(world(workers, work)):
        assert all(torch.equal(a, b) for a, b in zip(equal, wanted, strict=True))
        assert own.tolist() == [1.0, (workers - 1) / 2]


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"local_gradients was given .*: give the module whose parameters are trained"):
        local_gradients(nn.Linear(2, 2).parameters())  # type: ignore[arg-type]
