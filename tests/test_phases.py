"""Where the time of a step goes: counted on request, and named in torch's profiler without one."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from world import world

from dlion import Distributed
from dlion.phases import PHASES


def three_steps(rank: int, group: dist.ProcessGroup, profiled: bool) -> tuple[set[str], dict[str, float]]:
    """The ranges that the profiler saw on this worker, and the seconds that were counted."""
    model = torch.nn.Linear(8, 4)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    optimizer = Distributed(model.parameters(), lr=0.1, process_group=group, topology="sharded")
    watched = profile(activities=[ProfilerActivity.CPU]) if profiled and rank == 0 else None
    if watched is not None:
        watched.start()
    for step in range(3):
        torch.manual_seed(10 * rank + step)
        optimizer.zero_grad()
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    if watched is None:
        return set(), optimizer.phases.seconds
    watched.stop()
    return {event.key for event in watched.key_averages()}, optimizer.phases.seconds


def test_the_profiler_names_the_phases() -> None:
    (seen, seconds), _ = world(2, partial(three_steps, profiled=True))
    assert {f"dlion.{phase}" for phase in PHASES} <= seen
    assert set(seconds.values()) == {0.0}  # nobody asked to count


def test_nothing_is_made_while_nobody_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str) -> None:
        raise AssertionError(f"a range for {name} while no profiler runs")

    monkeypatch.setattr("dlion.phases.record_function", never)
    results = world(2, partial(three_steps, profiled=False))
    assert [seen for seen, _ in results] == [set(), set()]
