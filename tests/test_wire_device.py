"""Where rows lie, by what a group can send; and groups that torch makes without asking those who are no members."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import gloo_group

from dlion import channel, voting
from dlion.channel import wire_device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


@pytest.mark.parametrize(
    ("backends", "place"),
    [("cpu:gloo,cuda:gloo", CPU), ("cpu:gloo", CPU), ("cuda:nccl", GPU), ("cpu:gloo,cuda:nccl", GPU)],
)
@pytest.mark.parametrize("bound", [None, torch.device("cuda", 5)])
def test_rows_lie_where_a_backend_of_its_own_takes_them(
    backends: str, place: torch.device, bound: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel.dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(channel.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound)))
    wanted = bound if bound is not None and place == GPU else place
    assert wire_device(SimpleNamespace()) == wanted  # type: ignore[arg-type]


def test_a_group_that_torch_does_not_know_is_asked_itself() -> None:
    assert wire_device(gloo_group(dist.HashStore(), "unknown", 0, 1, 30)) == CPU


@pytest.mark.parametrize(("members", "unbound"), [(2, True), (4, False)])
def test_a_bound_default_group_is_not_split_for_some_of_its_ranks(
    members: int, unbound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = SimpleNamespace(bound_device_id=GPU, size=lambda: 4)
    monkeypatch.setattr(voting.dist, "group", SimpleNamespace(WORLD=everyone))
    with (
        pytest.raises(RuntimeError, match="no network"),
        voting._made_by_members_alone(
            SimpleNamespace(size=lambda: members)  # type: ignore[arg-type]
        ),
    ):
        assert everyone.bound_device_id == (None if unbound else GPU)
        raise RuntimeError("no network")
    assert everyone.bound_device_id == GPU
