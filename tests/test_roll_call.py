"""Whoever waits in vain says for whom, in which phase, and how long it waited."""

import copy
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import launch, meet_at_rank_0
from torch import nn
from world import gloo_group, succeed, world

from dlion import DistributedLion, roll_call
from dlion.channel import Channel
from dlion.errors import ExchangeError
from dlion.roll_call import Inquiry, StoreSilent, roll_call_of
from dlion.voting import wait_for_all

MODEL = nn.Linear(40, 30)
TIMEOUT = 3.0  # of processes
LEAVES_AT = 4


def step(model: nn.Module, opt: torch.optim.Optimizer, seed: int) -> None:
    opt.zero_grad()
    model(torch.randn(4, 40, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    opt.step()


def refused(call: Callable[[], Any]) -> tuple[str, float]:
    """What the error says, and after how many seconds it came."""
    began = time.monotonic()
    with pytest.raises(ExchangeError) as error:
        call()
    return str(error.value), time.monotonic() - began


# ---- in worlds of threads


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that answer within milliseconds need not be given longer."""
    monkeypatch.setattr(roll_call, "GRACE", 1.2)


@pytest.mark.wide(3)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("topology", ["sharded", "replicated", "server"])
def test_who_does_not_vote_is_named_with_phase_step_and_seconds(topology: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> tuple[str, float] | None:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, topology=topology)
        for number in range(2):
            step(model, opt, 10 * number + rank)
        return None if rank in (0, 3) else refused(lambda: step(model, opt, rank))

    for rank, found in enumerate(succeed(world(5, work, seconds=1))):
        if found is not None:
            text, seconds = found
            assert re.match(rf"rank {rank} of 5 lost another worker: ranks 0, 3 did not arrive within \d+\.\d s", text)
            assert "ballots at t=2" in text or "verdicts at t=2" in text
            assert seconds < 1 + 5


@pytest.mark.usefixtures("impatient")
def test_who_votes_and_does_not_count_is_missed_in_the_verdicts() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, topology="sharded")
        step(model, opt, rank)
        if rank == 1:
            exchange = opt._renewal.ready()[0]
            exchange.wire = None  # its ballot leaves with the others', and then it cannot count
            with pytest.raises(AttributeError):
                opt.step()
            return "gone"
        return refused(lambda: step(model, opt, rank))[0]

    said = succeed(world(3, work, seconds=1))
    assert said[1] == "gone"
    for rank in (0, 2):
        assert "rank 1 did not arrive" in said[rank]


@pytest.mark.usefixtures("impatient")
def test_all_who_wait_learn_of_it_whatever_call_they_are_in() -> None:
    """Rank 0 waits with a short limit; rank 2 waits for something else, and would for half a minute."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[str, float] | None:
        quick = gloo_group(group.get_group_store(), "quick", rank, 3, 1)
        hasty = Channel(quick, "ballots", roll_call_of(group))
        patient = Channel(group)
        if rank == 1:
            return None
        with patient.during("checkpoint"):
            return refused(patient.barrier) if rank == 2 else refused(hasty.barrier)

    first, _, third = succeed(world(3, work, seconds=30))
    for text, seconds in (first, third):
        assert "rank 1 did not arrive within" in text and "in checkpoint" in text
        assert seconds < 1 + 5
    assert "another worker's call failed first" in third[0]


def test_workers_that_wait_for_different_things_are_told_where_the_others_stand() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        quick = gloo_group(group.get_group_store(), "quick", rank, 2, 1)
        roll = roll_call_of(group)
        channel = [Channel(group, "evaluation"), Channel(quick, "verdicts", roll)][rank]
        roll.t = 7 + rank
        return refused(channel.barrier)[0]

    first, second = succeed(world(2, work, seconds=1.5))
    assert "in evaluation at t=7, though all workers answer; rank 1 stands in verdicts at t=8" in first
    assert "in verdicts at t=8, though all workers answer; rank 0 stands in evaluation at t=7" in second


@pytest.mark.usefixtures("impatient")
def test_bytes_in_the_store_that_are_no_text_are_shown_all_the_same() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        if rank == 1:
            group.get_group_store().set("dlion/roll/steps/0/1", b"\xff")
            return ""
        return refused(Channel(group, "ballots").barrier)[0]

    assert "though all workers answer; rank 1 stands in \ufffd: start again" in succeed(world(2, work, seconds=1))[0]


@pytest.mark.usefixtures("impatient")
def test_who_comes_back_too_late_hears_that_the_others_gave_up() -> None:
    gone = threading.Event()

    def work(rank: int, group: dist.ProcessGroup) -> tuple[str, float]:
        channel = Channel(group)
        if rank == 1:
            assert gone.wait(20)
        try:
            return refused(channel.barrier)
        finally:
            gone.set()

    early, late = succeed(world(2, work, seconds=2))
    assert "rank 1 did not arrive" in early[0]
    assert "though all workers answer" in late[0] and late[1] < 2 + 5


def test_a_patient_wait_is_no_error() -> None:
    """Longer than the time between two looks for a roll call."""
    arrived = threading.Barrier(2)

    def work(rank: int, group: dist.ProcessGroup) -> list[int]:
        channel = Channel(group)
        call = channel.all_gather(torch.tensor([rank])) if rank == 0 else None
        if rank == 0:
            assert call is not None
            threading.Timer(1.2, arrived.wait).start()  # the slow one comes then
            return list(call.wait().view(-1).tolist())
        arrived.wait()
        return list(channel.all_gather(torch.tensor([rank])).wait().view(-1).tolist())

    assert succeed(world(2, work)) == [[0, 1], [0, 1]]


# ---- a store that does not answer


class Stopped:
    """What a store is to whom it does not answer."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def clone(self) -> "Stopped":
        return self

    def check(self, keys: list[str]) -> bool:
        self.asked.wait(30)
        return False

    def set(self, key: str, value: str) -> None:
        self.asked.wait(30)


def test_a_silent_store_is_not_waited_for() -> None:
    store = Stopped()
    inquiry = Inquiry(lambda: store)
    for _ in range(2):  # the second question cannot even be asked
        began = time.monotonic()
        with pytest.raises(StoreSilent):
            inquiry.ask(lambda one: one.check(["key"]), 0.2)
        assert time.monotonic() - began < 2
    store.asked.set()
    assert inquiry.ask(lambda one: one.check(["key"]), 5) is False


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_silent_store_is_blamed_on_its_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> list[str]:
        store, channel = Stopped(), Channel(group)
        if rank == 1:
            return []
        monkeypatch.setattr(channel.roll_call, "_store", lambda: store)
        monkeypatch.setattr(channel.roll_call._inquiry, "_find", lambda: store)
        try:
            return [refused(channel.barrier)[0], refused(lambda: wait_for_all(group, "key", None))[0]]
        finally:
            store.asked.set()

    said, _ = succeed(world(2, work, seconds=1))
    assert "the process group's store, which could say whom, does not answer" in said[0]
    assert all("the worker that keeps it, most often rank 0" in text for text in said)


# ---- in real processes


def loses_one(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Train until the process that the folder names stops or dies, at its own step."""
    meet_at_rank_0(folder, "store", rank, size, TIMEOUT)
    lost, number = map(int, folder.name.split("-")[1:])
    model = copy.deepcopy(MODEL)
    opt = DistributedLion(model.parameters(), topology="sharded", bucket_bytes=8)
    for at in range(1000):
        if at == LEAVES_AT and rank == lost:
            os.kill(os.getpid(), number)
        began = time.monotonic()
        try:
            step(model, opt, 10 * at + rank)
        except ExchangeError as error:
            return {"step": at, "seconds": time.monotonic() - began, "said": str(error)}
    return {}


@pytest.mark.processes
@pytest.mark.parametrize(("lost", "number"), [(1, signal.SIGSTOP), (0, signal.SIGSTOP), (0, signal.SIGKILL)])
def test_a_process_that_is_stopped_or_killed_is_named_in_time(lost: int, number: int, tmp_path: Path) -> None:
    folder = tmp_path / f"lost-{lost}-{int(number)}"
    folder.mkdir()
    stopped = (lost,) if number == signal.SIGSTOP else ()
    torch.manual_seed(0)
    results = launch(folder, 3, loses_one, stopped=stopped)
    assert results[lost] == -signal.SIGKILL
    for rank in {0, 1, 2} - {lost}:
        said = results[rank]["said"]
        assert results[rank]["step"] == LEAVES_AT and results[rank]["seconds"] < TIMEOUT + 5
        assert f"rank {rank} of 3 lost another worker" in said and f"at t={LEAVES_AT}" in said
        assert "ballots" in said or "verdicts" in said
        if lost == 1:
            assert "rank 1 did not arrive within" in said
        else:
            assert "the worker that keeps it, most often rank 0" in said
