"""The stated rule of every odd case: zeros, missing and non-finite gradients, skipped steps, t, dtypes, odd tensors."""

import copy
import hashlib
import warnings

import pytest
import torch
from torch import nn
from world import succeed, world

from dlion import Distributed, DistributedLion
from dlion.errors import NonFiniteGradientError
from dlion.ops import KERNELS, library

AVAILABLE = [name for name in KERNELS if name != "triton" and (name != "native" or library.available())]  # on a CPU


def digest(params: list[torch.Tensor]) -> str:
    return hashlib.sha256(
        b"".join(p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in params)
    ).hexdigest()


def small_model() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 80), nn.ReLU(), nn.Linear(80, 5))
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator) * 0.2
    return model


MODEL = small_model()
IN_NUMBERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("g-lion", "g-adamw")]


@pytest.mark.wide(4)
@pytest.mark.parametrize("fault", ["no fault", "missing", "nan"])
@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg", *IN_NUMBERS])
def test_two_hundred_steps_keep_four_replicas_equal(method: str, fault: str) -> None:
    """Workers' gradients differ, parameters move, replicas stay bitwise equal, also with one bad worker in turn."""

    def work(rank: int, group: object) -> tuple[list[str], list[str], int]:
        model = copy.deepcopy(MODEL)
        opt = Distributed(model.named_parameters(), method, lr=1e-3, process_group=group)
        generator = torch.Generator().manual_seed(100 + rank)
        params, grads = [], []
        for step in range(200):
            opt.zero_grad()
            model(torch.randn(4, 12, generator=generator)).square().mean().backward()
            grads.append(digest([p.grad for p in model.parameters()]))
            if step % 4 == rank and fault == "missing":
                opt.zero_grad()
            if step % 4 == rank and fault == "nan":
                for param in model.parameters():
                    param.grad.fill_(float("nan"))
            opt.step()
            params.append(digest(list(model.parameters())))
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        return params, grads, opt.stats.abstentions

    ranks = succeed(world(4, work))
    print(f"\n{method}, one worker's gradients in turn {fault}: {[params[-1][:12] for params, _, _ in ranks]}")
    for params, _, _ in ranks:
        assert params == ranks[0][0] and len(set(params)) == 200
    for step in range(200):
        assert len({grads[step] for _, grads, _ in ranks}) == 4
    assert {abstentions for _, _, abstentions in ranks} == {200 if fault == "nan" else 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "ties"), [(1, "rotate"), (2, "rotate"), (3, "rotate"), (4, "rotate"), (5, "rotate"), (4, "alternate")]
)
@pytest.mark.parametrize("zeros", ["balanced", "exact"])
def test_a_row_without_gradient_stays(workers: int, ties: str, zeros: str) -> None:
    """1,000 steps at lr 1e-3: within one lr of where it began with one bit, exactly there with two."""
    lr = 1e-3

    def work(rank: int, group: object) -> tuple[float, torch.Tensor]:
        table = nn.Embedding(6, 16)
        table.weight.data = torch.linspace(-1, 1, 96).view(6, 16).clone()
        before = table.weight.detach().clone()
        opt = DistributedLion(table.parameters(), lr=lr, zeros=zeros, ties=ties, process_group=group)
        worst = 0.0
        for step in range(1000):
            opt.zero_grad()
            table(torch.tensor([(step + rank) % 5])).sum().backward()  # row 5 never
            opt.step()
            worst = max(worst, float((table.weight.detach()[5] - before[5]).abs().max()))
        return worst, table.weight.detach()

    ranks = succeed(world(workers, work))
    assert all(torch.equal(weight, ranks[0][1]) for _, weight in ranks)
    rounding = 1e-6  # p - lr + lr is not p in float32
    allowed = 0.0 if zeros == "exact" or workers == 1 else lr + rounding
    assert all(worst <= allowed for worst, _ in ranks)
    assert float((ranks[0][1][:5] - torch.linspace(-1, 1, 96).view(6, 16)[:5]).abs().min()) > 10 * lr


def one_parameter(rank: int, group: object, grads: list[list[list[float]]], **options: object) -> dict[str, object]:
    """Two buckets of 64 elements; grads[step][rank] holds the two values that fill them."""
    param = nn.Parameter(torch.zeros(128))
    opt = DistributedLion([param], lr=1.0, bucket_bytes=8, topology="sharded", process_group=group, **options)
    for step in grads:
        param.grad = torch.tensor(step[rank]).repeat_interleave(64)
        opt.step()
    return {
        "moves": param.detach()[::64].tolist(),
        "momentum": opt.state[param]["exp_avg"][::64].tolist(),
        "t": opt.param_groups[0]["t"],
        "abstentions": opt.stats.abstentions,
        "skipped": opt.stats.skipped,
    }


NAN = float("nan")


def test_abstain_leaves_the_others_to_decide_bucket_by_bucket() -> None:
    grads = [[[NAN, 1.0], [1.0, -1.0], [1.0, -1.0]]]
    for rank, seen in enumerate(succeed(world(3, lambda r, g: one_parameter(r, g, grads)))):
        assert seen["moves"] == [-1.0, 1.0]
        assert seen["t"] == 1 and seen["abstentions"] == 1 and seen["skipped"] == 0
        first = 0.0 if rank == 0 else 1 * (1 - 0.99)
        assert seen["momentum"] == pytest.approx([first, 0.01 if rank == 0 else -0.01])


def test_a_bucket_without_voters_does_not_move_and_a_step_without_does_not_count() -> None:
    grads = [[[NAN, 1.0]] * 3, [[NAN, NAN]] * 3]
    for seen in succeed(world(3, lambda r, g: one_parameter(r, g, grads, weight_decay=0.1))):
        assert seen["moves"] == [0.0, -1.0]
        assert seen["t"] == 1 and seen["abstentions"] == 9 and seen["skipped"] == 1


def test_skip_moves_nobody_but_the_momentum() -> None:
    grads = [[[1.0, 1.0]] * 3, [[1.0, 1.0], [1.0, NAN], [1.0, 1.0]], [[1.0, 1.0]] * 3]
    for rank, seen in enumerate(succeed(world(3, lambda r, g: one_parameter(r, g, grads, nonfinite="skip")))):
        assert seen["moves"] == [-2.0, -2.0]
        assert seen["t"] == 2 and seen["skipped"] == 1
        moved = [1 - 0.99**3, 1 - 0.99 ** (2 if rank == 1 else 3)]
        assert seen["momentum"] == pytest.approx(moved, rel=1e-5)


def test_raise_names_the_rank_and_the_parameter_on_every_rank_and_writes_nothing() -> None:
    def work(rank: int, group: object) -> tuple[str, list[float]]:
        layer = nn.Linear(2, 2)
        nn.init.ones_(layer.weight)
        nn.init.ones_(layer.bias)
        opt = DistributedLion(layer.named_parameters(), nonfinite="raise", process_group=group, bucket_bytes=8)
        layer.weight.grad = torch.ones(2, 2)
        layer.bias.grad = torch.tensor([1.0, float("inf") if rank == 2 else 1.0])
        with pytest.raises(NonFiniteGradientError) as error:
            opt.step()
        return str(error.value), [*layer.weight.flatten().tolist(), *layer.bias.tolist()]

    for text, values in succeed(world(3, work)):
        assert "bias on rank 2" in text and "rank 0" not in text
        assert values == [1.0] * 6


@pytest.mark.parametrize("method", ["g-lion", "g-adamw"])
def test_the_mean_of_a_global_method_leaves_out_who_abstains(method: str) -> None:
    def work(rank: int, group: object) -> torch.Tensor:
        param = nn.Parameter(torch.ones(3))
        opt = Distributed([param], method, lr=0.1, process_group=group)
        for _ in range(2):
            param.grad = torch.full((3,), NAN) if rank == 0 else torch.tensor([1.0, -1.0, 3.0])
            opt.step()
        return param.detach()

    def healthy(rank: int, group: object) -> torch.Tensor:
        param = nn.Parameter(torch.ones(3))
        opt = Distributed([param], method, lr=0.1, process_group=group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                param.grad = torch.tensor([1.0, -1.0, 3.0])
                opt.step()
        return param.detach()

    wanted = succeed(world(2, healthy))[0]
    assert all(torch.equal(seen, wanted) for seen in succeed(world(3, work)))


def test_the_first_step_with_lr_zero_allocates_and_nothing_else() -> None:
    param = nn.Parameter(torch.ones(3))
    opt = DistributedLion([param], lr=0.0)
    param.grad = torch.ones(3)
    opt.step()
    assert opt.state[param]["exp_avg"].tolist() == [0.0] * 3 and opt.param_groups[0]["t"] == 0
    opt.step()
    assert opt.state[param]["exp_avg"].abs().max() > 0 and opt.param_groups[0]["t"] == 1
    assert param.tolist() == [1.0] * 3


@pytest.mark.parametrize("kernels", AVAILABLE)
def test_a_momentum_that_is_not_a_number_never_votes(kernels: str) -> None:
    """As a damaged checkpoint may hold it: the worker abstains, and the others decide."""

    def work(rank: int, group: object) -> tuple[list[float], int]:
        param = nn.Parameter(torch.zeros(3))
        opt = DistributedLion([param], lr=1.0, process_group=group, kernels=kernels)
        opt.state[param]["exp_avg"] = torch.tensor([0.0, NAN if rank == 0 else 0.0, 0.0])
        param.grad = torch.full((3,), -1.0 if rank else 1.0)
        opt.step()
        return param.tolist(), opt.stats.abstentions

    assert succeed(world(3, work)) == [([1.0, 1.0, 1.0], 1)] * 3


def test_small_momenta_are_stored_as_zero() -> None:
    param = nn.Parameter(torch.ones(2))
    opt = DistributedLion([param])
    param.grad = torch.tensor([1e-37, 1e-35])  # momenta 1e-39 (denormal) and 1e-37
    opt.step()
    assert opt.state[param]["exp_avg"][0] == 0 and opt.state[param]["exp_avg"][1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_float_dtype_moves_by_lr_and_keeps_wide_momentum(dtype: torch.dtype) -> None:
    def work(rank: int, group: object) -> tuple[torch.Tensor, torch.dtype]:
        param = nn.Parameter(torch.ones(70, dtype=dtype))
        opt = DistributedLion([param], lr=0.25, weight_decay=0.5, process_group=group)
        param.grad = torch.ones(70, dtype=dtype)
        opt.step()
        return param.detach(), opt.state[param]["exp_avg"].dtype

    for values, momentum in succeed(world(3, work)):
        assert torch.equal(values, torch.full((70,), 1 - 0.125 - 0.25, dtype=dtype))
        assert momentum == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_odd_tensors_in_one_model() -> None:
    """Strides, empty and scalar tensors and mixed dtypes, cut by small buckets, give what plain tensors give."""
    generator = torch.Generator().manual_seed(0)
    base = [
        torch.randn(6, 70, generator=generator).t(),
        torch.randn(2, 3, 5, 4, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(0, 3),
        torch.tensor(0.5, dtype=torch.float64),
        torch.randn(200, generator=generator)[7:170:3],
    ]

    def work(rank: int, group: object, straight: bool) -> list[torch.Tensor]:
        own = torch.Generator().manual_seed(rank)
        values = [t.clone(memory_format=torch.contiguous_format) if straight else t for t in base]
        params = [nn.Parameter(v.clone() if straight else torch.empty_like(v).copy_(v)) for v in values]
        opt = DistributedLion(params, lr=1e-2, weight_decay=0.1, process_group=group, bucket_bytes=16)
        for _ in range(4):
            for param in params:
                grad = torch.randn(param.shape, generator=own, dtype=param.dtype)
                param.grad = grad if straight else torch.empty_like(param).copy_(grad)
            opt.step()
        return [p.detach() for p in params]

    odd = succeed(world(3, lambda r, g: work(r, g, straight=False)))
    plain = succeed(world(3, lambda r, g: work(r, g, straight=True)))
    assert not odd[0][0].is_contiguous()
    for mine, theirs in zip(odd, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_layout_without_elements_still_counts_its_steps() -> None:
    def work(rank: int, group: object) -> tuple[int, int]:
        opt = DistributedLion([nn.Parameter(torch.empty(0))], process_group=group)
        opt.step()
        return opt.param_groups[0]["t"], opt.stats.bytes_sent

    assert succeed(world(3, work)) == [(1, 32)] * 3  # a header to each of two others
