"""Parameters and gradients of every shape, stride and dtype: where they lie in memory changes no bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed
from dlion.methods import METHODS

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def beside(values: Tensor) -> Tensor:
    """The same values in a slice whose storage begins three elements earlier."""
    store = torch.zeros(values.numel() + 5, dtype=values.dtype)
    part = store[3 : 3 + values.numel()].view(values.shape)
    return part.copy_(values)


def every_second(values: Tensor) -> Tensor:
    """The same values with gaps between them."""
    store = torch.zeros(*values.shape, 2, dtype=values.dtype)
    return store[..., 1].copy_(values)


def across(values: Tensor) -> Tensor:
    """The same values stored in the order of the reversed dimensions."""
    order = tuple(reversed(range(values.dim())))
    return values.permute(order).contiguous().permute(order)


def channels_last(values: Tensor) -> Tensor:
    return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else across(values)


PLACES = [beside, every_second, across, channels_last]
SHAPES = [(), (1,), (65,), (7, 11), (0,), (3, 0, 2), (2, 3, 4, 5), (1, 1, 1, 1)]


def gradients(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(17 * rank + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def trained(
    method: str, dtypes: list[torch.dtype], place: Callable[[Tensor], Tensor], workers: int = 2
) -> list[list[Tensor]]:
    """What each worker has after four steps, in ordinary memory."""
    with torch.no_grad():
        starts = [place(value) for dtype in dtypes for value in gradients(99, 0, dtype)]
    strides = [start.stride() for start in starts]

    def work(rank: int, group: object) -> list[Tensor]:
        # clone() would choose a memory layout of its own
        params = [nn.Parameter(place(start.clone())) for start in starts]
        options = {"bucket_bytes": 32} if "bucket_bytes" in METHODS[method].options else {}
        optimizer = Distributed(params, method, lr=0.01, weight_decay=0.1, process_group=group, **options)
        for step in range(4):
            for p, g in zip(params, [g for d in dtypes for g in gradients(rank, step, d)], strict=True):
                p.grad = place(g)
            optimizer.step()
        assert [p.stride() for p in params] == strides
        return [p.detach().clone(memory_format=torch.contiguous_format) for p in params]

    return succeed(world(workers, work))


@pytest.mark.wide(9)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", METHODS)
def test_memory_layout_changes_no_bit(method: str, place: Callable[[Tensor], Tensor]) -> None:
    plain = trained(method, [torch.float32], lambda values: values.contiguous())
    placed = trained(method, [torch.float32], place)
    for mine in (*plain, *placed):
        assert all(torch.equal(a, b) for a, b in zip(mine, plain[0], strict=True))


@pytest.mark.wide(5)
@pytest.mark.parametrize("method", METHODS)
def test_dtypes_mix_in_one_model_and_one_bucket(method: str) -> None:
    dtypes = FLOATS[:3] if method == "g-adamw" else FLOATS  # AdamW's eps of 1e-8 is 0 in float16
    together = trained(method, dtypes, beside, workers=3)
    for other in together[1:]:
        assert all(torch.equal(a, b) for a, b in zip(together[0], other, strict=True))
    assert [t.dtype for t in together[0]] == [dtype for dtype in dtypes for _ in SHAPES]
    for moved, start in zip(together[0], [v for d in dtypes for v in gradients(99, 0, d)], strict=True):
        assert moved.isfinite().all() and (moved.numel() < 2 or not torch.equal(moved, start))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_gradient_may_be_expanded_and_of_another_dtype(dtype: torch.dtype) -> None:
    """Of torch's own making: the gradient of a sum is one number, expanded."""
    ends = []
    for full in (False, True):
        p = nn.Parameter(torch.linspace(-1, 1, 70).to(dtype))
        optimizer = Distributed([p], lr=0.25, weight_decay=0.5)
        for sign in (1.0, -1.0, 1.0):
            grad = torch.tensor(sign, dtype=dtype).expand(70)
            p.grad = grad.contiguous() if full else grad
            assert full or p.grad.stride() == (0,)
            optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)


def test_a_model_cast_after_construction_goes_on_with_its_momentum() -> None:
    def work(rank: int, group: object) -> Tensor:
        model = nn.Linear(3, 2)
        for p in model.parameters():
            p.data.fill_(1)
        optimizer = Distributed(model.parameters(), lr=0.5, process_group=group)
        for cast in (model.float, model.bfloat16, model.double):
            cast()
            model.zero_grad()
            model(torch.full((1, 3), 1.0 + rank, dtype=model.weight.dtype)).sum().backward()
            optimizer.step()
        assert optimizer.param_groups[0]["t"] == 3
        assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float32
        return model.weight.detach()

    a, b = succeed(world(2, work))
    assert torch.equal(a, b) and torch.equal(a, torch.full((2, 3), -0.5, dtype=torch.float64))
