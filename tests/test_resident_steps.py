"""A step on the device reads no tensor, so that it may go into a graph; t, a tensor there, is a number elsewhere."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from resident_model import Model, on_device, optimizer_of, other_lr
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from uneven import ranks_of_threads
from unread import read, unread, watch
from world import gloo_group, succeed, world

import dlion.checkpoint
from dlion import Distributed, copies
from dlion.errors import AgreementError
from dlion.resident import choice, exchange
from dlion.resident.exchange import ResidentExchange

assert watch and on_device


# ---- t as a tensor


def test_a_checkpoint_a_copy_and_a_pickle_hold_t_as_a_number(tmp_path: Any) -> None:
    def work(rank: int, group: Any) -> None:
        model = Model()
        optimizer = optimizer_of(model, group)
        for step in range(3):
            model.fill(rank, step)
            optimizer.step()
        assert isinstance(optimizer.param_groups[0]["t"], Tensor)
        dlion.checkpoint.save(tmp_path / "good", model, optimizer)
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert other.param_groups[0]["t"] == 3 and type(other.param_groups[0]["t"]) is int
            assert other.stats == optimizer.stats and other.stats.steps == 3
        twin = Model()
        resumed = optimizer_of(twin, group)
        dlion.checkpoint.load(tmp_path / "good", twin, resumed)
        for net, opt in ((model, optimizer), (twin, resumed)):
            net.fill(rank, 3)
            opt.step()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
        assert int(resumed.param_groups[0]["t"]) == int(optimizer.param_groups[0]["t"]) == 4
        resumed.load_state_dict(optimizer.state_dict())
        assert type(resumed.param_groups[0]["t"]) is int

    succeed(world(2, work))


# ---- nothing is read


@pytest.mark.wide(3)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("options", [{}, {"zeros": "exact"}, {"method": "dlion-avg"}, {"nonfinite": "raise"}])
def test_no_step_reads_a_tensor(workers: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    heard = copies.Copy.heard

    def allowed(self: copies.Copy) -> list[Any]:
        with read():  # what the device has copied for the host
            return heard(self)

    monkeypatch.setattr(copies.Copy, "heard", allowed)

    def work(rank: int, group: Any) -> int:
        model = Model()
        optimizer = optimizer_of(model, group, lr=torch.tensor(0.01), verify_every=5, **options)
        for step in range(22):
            model.fill(rank, step)
            optimizer.param_groups[0]["lr"] *= 0.9
            if step == 0:  # it makes groups and state, and agrees with the others
                optimizer.step()
                continue
            with unread():
                optimizer.step()
        optimizer.check()
        stats = optimizer.stats
        assert workers == 1 or (stats.vote_samples, stats.checks, stats.steps) == (2, 4, 22)
        assert isinstance(optimizer._renewal._exchange, ResidentExchange)
        return int(optimizer.param_groups[0]["t"])

    found = [work(0, None)] if workers == 1 else succeed(world(workers, work))
    assert found == [22] * workers


def test_a_step_on_the_host_reads_and_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "is_accelerator", lambda device: False)
    param = nn.Parameter(torch.ones(70))
    optimizer = Distributed([param])
    param.grad = torch.ones(70)
    with pytest.raises(AssertionError, match="was asked for"), unread():
        optimizer.step()


# ---- graphs


def test_what_cannot_be_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(70))
    for policy, steps, text in (("raise", 1, "nonfinite='raise' cannot be captured"), ("skip", 0, "the first step")):
        optimizer = Distributed([param], nonfinite=policy)
        param.grad = torch.ones(70)
        for _ in range(steps):
            optimizer.step()
        with monkeypatch.context() as capture:
            for module in (exchange, choice):
                capture.setattr(module, "is_captured", lambda device: True)
            with pytest.raises(ValueError, match=text):
                optimizer.step()


def test_what_a_graph_repeats_is_heard_of_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step is one whose host looks at nothing, before it and after it."""
    here = threading.local()
    monkeypatch.setattr(exchange, "is_captured", lambda device: getattr(here, "capturing", False))

    def work(rank: int, group: Any) -> str:
        model = Model()
        optimizer = optimizer_of(model, group)
        model.fill(rank, 0)
        optimizer.step()
        cost = optimizer.stats.traffic()
        here.capturing = True
        for step in range(1, 4):
            model.fill(rank, step)
            with unread():
                optimizer.step()
        before = model.copies()
        other_lr(model, optimizer, rank, 2)
        optimizer.step()
        other_lr(model, optimizer, rank, 0)
        optimizer.step()
        assert all(map(torch.equal, before, model.copies()))
        here.capturing = False
        with pytest.raises(AgreementError) as caught:
            optimizer.check()
        assert optimizer.stats.steps == optimizer.param_groups[0]["t"] == 4
        assert optimizer.stats.traffic() == tuple(6 * one for one in cost)  # two were refused, but sent what they sent
        optimizer.step()
        optimizer.check()
        assert optimizer.stats.steps == optimizer.param_groups[0]["t"] == 5
        return str(caught.value)

    assert len(set(succeed(world(2, work)))) == 1


# ---- beside steps


def test_another_group_is_gone_on_with_when_the_first_one_is_gone() -> None:
    def work(rank: int, group: Any) -> None:
        model = Model()
        optimizer = optimizer_of(model, group, verify_every=3)
        for step in range(3):  # a comparison is due, and the group will not be there for it
            model.fill(rank, step)
            optimizer.step()
        optimizer.process_group = group_of_one
        model.fill(rank, 3)
        optimizer.step()
        assert optimizer._renewal._exchange.workers == 1
        optimizer.check()
        assert optimizer.stats.steps == optimizer.param_groups[0]["t"] == 4

    group_of_one = gloo_group(dist.HashStore(), "alone", 0, 1, 30)
    succeed(world(2, work))


def test_who_has_finished_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_of_threads(monkeypatch)

    def work(rank: int, group: Any) -> tuple[list[Tensor], int, dict[str, Any]]:
        model = Model()
        optimizer = optimizer_of(model, group, verify_every=2)
        with Join([optimizer]):
            for step in range((3, 7)[rank]):
                model.fill(rank, step)
                optimizer.step()
        model.fill(rank, 9)
        optimizer.step()
        optimizer.check()
        return model.copies(), int(optimizer.param_groups[0]["t"]), optimizer.stats.state_dict()

    device = succeed(world(2, work))
    monkeypatch.setattr(choice, "is_accelerator", lambda device: False)
    for mine, there in zip(succeed(world(2, work)), device, strict=True):
        assert all(map(torch.equal, mine[0], there[0])) and mine[1] == there[1] == 8
        assert mine[2] == there[2] and mine[2]["abstentions"] > 0
