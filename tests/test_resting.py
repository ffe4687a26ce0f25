"""A step in which a worker rests: it counts the others' ballots, its own do not count, and nothing of its own moves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed
from dlion.methods import METHODS

WORKERS, STEPS, LR = 3, 5, 0.01
RESTS = (0, 2, 3)  # among them the first step: this worker has never been asked anything then
SHAPES = ((30, 5), (70,), ())
OPTIONS: list[dict[str, Any]] = [
    *({"method": method, "topology": topology} for method in METHODS for topology in METHODS[method].topologies),
    {"zeros": "exact", "bucket_bytes": 16},
    {"method": "dlion-avg", "zeros": "exact", "bucket_bytes": 16},
    {"bucket_bytes": 16, "overlap": True},
    {"bucket_bytes": 16, "momentum_dtype": torch.bfloat16, "kernels": "reference"},
]


class Rester(Distributed):
    """Rests in some of its steps."""

    def rest_in(self, steps: tuple[int, ...]) -> None:
        ready = self._renewal.ready

        def ready_to_rest() -> Any:
            exchange, how = ready()
            if exchange.stats.steps in steps:
                exchange.rest()
            return exchange, how

        self._renewal.ready = ready_to_rest  # type: ignore[method-assign]


def trained(rank: int, group: Any, rests: bool, nan: bool, **options: Any) -> tuple[list[Tensor], list[Any], Any]:
    """Parameters after the last step, all state after each, and the statistics; rank 1 is not like the others."""
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = Rester(params, lr=LR, process_group=group, **options)
    if rests and rank == 1:
        optimizer.rest_in(RESTS)
    states = []
    for step in range(STEPS):
        noise = torch.Generator().manual_seed(100 * step + rank)
        for param in params:
            param.grad = torch.randn(param.shape, generator=noise)
            if nan and rank == 1 and step in RESTS:
                param.grad.fill_(torch.nan)
        optimizer.step()
        states.append([{k: torch.as_tensor(v).clone() for k, v in each.items()} for each in optimizer.state.values()])
    return [param.detach() for param in params], states, optimizer.stats


def equal(these: Any, those: Any) -> bool:
    if isinstance(these, Tensor):
        return torch.equal(these, those)
    if isinstance(these, dict):
        return these.keys() == those.keys() and all(equal(these[name], those[name]) for name in these)
    return len(these) == len(those) and all(map(equal, these, those))


@pytest.mark.wide(9)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_who_rests_is_as_one_whose_gradients_are_all_nan(options: dict[str, Any]) -> None:
    rested = succeed(world(WORKERS, lambda r, g: trained(r, g, True, False, **options)))
    silent = succeed(world(WORKERS, lambda r, g: trained(r, g, False, True, **options)))
    everybody = succeed(world(WORKERS, lambda r, g: trained(r, g, False, False, **options)))
    for (params, states, stats), (wanted, wanted_states, wanted_stats) in zip(rested, silent, strict=True):
        assert equal(params, rested[0][0]) and equal(params, wanted)
        assert equal(states, wanted_states)
        assert stats == wanted_stats and stats.abstentions >= len(RESTS)
    assert not equal(rested[0][0], everybody[0][0])


@pytest.mark.parametrize("nonfinite", ["abstain", "skip", "raise"])
def test_the_momentum_of_who_rests_stays_and_the_others_go_on_whatever_the_policy(nonfinite: str) -> None:
    options = {"bucket_bytes": 16, "nonfinite": nonfinite}
    results = succeed(world(WORKERS, lambda r, g: trained(r, g, True, False, **options)))
    _, states, stats = results[1]
    for step in range(1, STEPS):
        assert equal(states[step], states[step - 1]) == (step in RESTS), step
    assert all(not equal(a, b) for a, b in zip(results[0][1], results[0][1][1:], strict=False))
    assert stats.skipped == 0 and stats.abstentions == 3 * len(RESTS)  # buckets of 128 elements


def test_a_step_in_which_everybody_rests_moves_nothing_and_is_not_counted() -> None:
    def work(rank: int, group: Any) -> tuple[Tensor, Any, int]:
        param = nn.Parameter(torch.ones(100))
        optimizer = Rester([param], lr=LR, weight_decay=0.1, process_group=group)
        optimizer.rest_in((0, 1))
        for _ in range(2):
            param.grad = torch.ones(100)
            optimizer.step()
        return param.detach(), optimizer.stats, optimizer.param_groups[0]["t"]

    for param, stats, t in succeed(world(WORKERS, work)) + [work(0, None)]:
        assert torch.equal(param, torch.ones(100))
        assert (stats.steps, stats.skipped, t) == (2, 2, 0)
