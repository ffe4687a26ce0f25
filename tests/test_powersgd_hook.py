"""PowerSGD against torch's own hook, step after step, to rounding."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from world import succeed, world

from dlion import Distributed

SHAPES = [(9, 40), (64,), (8, 3, 3, 5), (3, 5), (30, 7)]
RANK, STEPS, LR = 2, 6, 0.5


def gradients(rank: int, step: int) -> list[Tensor]:
    own = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=own) for shape in SHAPES]


def first_q(slot: int) -> Tensor:
    """What dlion draws with seed 0."""
    columns = torch.Size(SHAPES[slot][1:]).numel()
    return torch.randn(columns, RANK, generator=torch.Generator().manual_seed(slot))


def by_the_hook(rank: int, group: object, thin: list[int]) -> list[list[Tensor]]:
    """The mean gradients of every step, as DDP would get them from the hook."""
    state = PowerSGDState(group, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    state.iter = 2
    # its own random start would use torch's global generator, which the ranks of this world share
    state.q_memory_dict[0] = torch.cat([first_q(slot).view(-1) for slot in thin])
    state.p_memory_dict[0] = torch.empty(sum(SHAPES[slot][0] * RANK for slot in thin))
    means = []
    for step in range(STEPS):
        grads = gradients(rank, step)
        flat = torch.cat([grad.view(-1) for grad in grads])
        parts = [part.view(shape) for part, shape in zip(flat.split([g.numel() for g in grads]), SHAPES, strict=True)]
        bucket = SimpleNamespace(
            buffer=lambda flat=flat: flat, gradients=lambda parts=parts: parts, index=lambda: 0, is_last=lambda: True
        )
        powerSGD_hook(state, bucket).wait()
        means.append([part.clone() for part in parts])
    return means


def by_dlion(rank: int, group: object) -> list[list[Tensor]]:
    """Read off what a descent without momentum subtracts; PowerSGD's form of momentum adds the gradient twice then."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    opt = Distributed(params, "powersgd", LR, process_group=group, momentum=0.0, rank=RANK)
    means = []
    for step in range(STEPS):
        for param, grad in zip(params, gradients(rank, step), strict=True):
            param.grad = grad
            param.data.zero_()
        opt.step()
        means.append([-param.detach().clone() / (2 * LR) for param in params])
    return means


def test_means_are_those_of_the_hook() -> None:
    thin = [0, 2, 4]  # (3, 5) is not worth it
    hooked = succeed(world(3, lambda rank, group: by_the_hook(rank, group, thin)))
    mine = succeed(world(3, by_dlion))
    for wanted, found in zip(hooked, mine, strict=True):
        for step in range(STEPS):
            for a, b in zip(wanted[step], found[step], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    exact = [torch.stack(each).mean(0) for each in zip(*(gradients(rank, 0) for rank in range(3)), strict=True)]
    same = [torch.allclose(a, b, atol=1e-3) for a, b in zip(exact, mine[0][0], strict=True)]
    assert same == [slot not in thin for slot in range(len(SHAPES))]
