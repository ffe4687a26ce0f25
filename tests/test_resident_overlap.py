"""overlap=True, steps on the device: ballots leave in backward; of a step the host hears when the next one closes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from branching import MODEL, SMALL, STEPS, Branches, backward, train, values
from resident_model import on_device
from test_overlap_refused import clear, clip, negate, replace, turn_round, zero_in_place
from torch import Tensor
from unread import read, unread, watch
from world import succeed, world

from dlion import Distributed, copies
from dlion.errors import AgreementError, DlionError, OverlapError
from dlion.resident import choice, exchange
from dlion.resident.exchange import ResidentExchange

assert watch and on_device

Change = Callable[[int, Branches, Distributed], None]


def other_lr(step: int, model: Branches, opt: Distributed) -> None:
    """As a schedule between backward and `step()`, which the ballots that have left know nothing of."""
    opt.param_groups[0]["lr"] = 1e-3 / (step + 1)


def tensor_lr(step: int, model: Branches, opt: Distributed) -> None:
    opt.param_groups[0]["lr"] = torch.tensor(1e-3 / (step + 1))


CASES: list[tuple[dict[str, Any], Change | None]] = [
    ({"topology": "sharded"}, None),
    ({"topology": "replicated", "zeros": "exact"}, None),
    ({"topology": "server", "method": "dlion-avg"}, None),
    ({"topology": "sharded", "nonfinite": "skip", "verify_every": 2}, other_lr),
    ({"topology": "replicated", "method": "d-signum-mavo", "verify_every": 1}, tensor_lr),
    ({"topology": "sharded", "zeros": "exact", "method": "dlion-avg"}, other_lr),
]


@pytest.mark.wide(3)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("options", "change"), CASES)
def test_the_bits_are_those_of_the_host(
    options: dict[str, Any], change: Change | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int, group: object, overlap: bool) -> tuple[Tensor, list[int], dict[str, Any]]:
        kinds = []

        def look(step: int, model: Branches, opt: Distributed) -> None:
            if change is not None:
                change(step, model, opt)
            kinds.append(type(opt._renewal._exchange))

        found = train(rank, group, look, overlap=overlap, bucket_bytes=SMALL, **options)
        assert not overlap or kinds[-1] is ResidentExchange
        return found

    device = succeed(world(workers, lambda rank, group: work(rank, group, True)))
    monkeypatch.setattr(choice, "is_accelerator", lambda device: False)
    host = succeed(world(workers, lambda rank, group: work(rank, group, False)))
    for (wanted, none, counted), (found, left, counters) in zip(host, device, strict=True):
        assert torch.equal(found, wanted) and none == [0] * STEPS
        assert left[0] == 0 and min(left[1:]) > 0  # the first step agrees; afterwards buckets leave in backward
        late = {"checks", "check_bytes_sent", "check_bytes_received"}  # of the last step, which nobody has heard of
        assert {k: v for k, v in counters.items() if k not in late} == {
            k: v for k, v in counted.items() if k not in late
        }


@pytest.mark.parametrize("workers", [1, 3])
def test_no_step_reads_a_tensor(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = copies.Copy.heard

    def allowed(self: copies.Copy) -> list[Any]:
        with read():  # what the device has copied for the host
            return heard(self)

    monkeypatch.setattr(copies.Copy, "heard", allowed)

    def work(rank: int, group: Any) -> None:
        model = copy.deepcopy(MODEL)
        opt = Distributed(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True, verify_every=5)
        for step in range(12):
            opt.zero_grad()
            if step == 0:
                backward(model, rank, step)
                opt.step()
                continue
            with unread():
                backward(model, rank, step)
                opt.step()
        opt.check()
        assert opt.stats.steps == opt.param_groups[0]["t"] == 12
        assert isinstance(opt._renewal._exchange, ResidentExchange)

    succeed(world(workers, work))


def spoiled(rank: int, group: Any, spoil: Callable[[Branches, Distributed, int, int], None]) -> tuple[str, int]:
    """The first error, and the step that raised it; parameters rest from step 2 on, and move again after it."""
    model = copy.deepcopy(MODEL)
    opt = Distributed(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True, timeout=10)
    before = values(model)
    for step in range(6):
        opt.zero_grad()
        spoil(model, opt, rank, step)
        if step == 2:
            before = values(model)
        backward(model, rank, step)
        try:
            opt.step()
        except DlionError as error:
            assert torch.equal(values(model), before)
            return f"{type(error).__name__}: {error}", step
    raise AssertionError("no error was raised")


def lr_of_one(model: Branches, opt: Distributed, rank: int, step: int) -> None:
    opt.param_groups[0]["lr"] = 0.5 if (rank, step) == (1, 1) else 0.25


def betas_of_one(model: Branches, opt: Distributed, rank: int, step: int) -> None:
    opt.param_groups[0]["betas"] = (0.5, 0.6) if (rank, step) == (1, 2) else (0.9, 0.99)


def frozen_by_one(model: Branches, opt: Distributed, rank: int, step: int) -> None:
    if (rank, step) == (1, 2):
        model.shared.weight.requires_grad_(False)


SPOILS = [
    (lr_of_one, "on rank 1 group 0 has lr=0.5 instead of 0.25"),
    (betas_of_one, "on rank 1 group 0 has betas=[0.5, 0.6] instead of [0.9, 0.99]"),
    (frozen_by_one, "the layout changed on rank 1 alone"),
]


@pytest.mark.parametrize(("spoil", "text"), SPOILS)
def test_what_differs_is_named_by_all_when_the_next_step_closes(spoil: Any, text: str) -> None:
    found = succeed(world(3, lambda rank, group: spoiled(rank, group, spoil)))
    assert len({said for said, _ in found}) == 1 and text in found[0][0]
    assert [step for _, step in found] == [3, 3, 3]


def test_a_layout_that_changes_everywhere_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, group: object, overlap: bool) -> Tensor:
        def freeze(step: int, model: Branches, opt: Distributed) -> None:
            if step == 1:
                opt.step()
                model.shared.weight.requires_grad_(False)
                model.shared.weight.grad = None
                opt.zero_grad()
                backward(model, rank, 50)

        return train(rank, group, freeze, overlap=overlap, bucket_bytes=SMALL)[0]

    device = succeed(world(3, lambda rank, group: work(rank, group, True)))
    monkeypatch.setattr(choice, "is_accelerator", lambda device: False)
    host = succeed(world(3, lambda rank, group: work(rank, group, False)))
    assert all(torch.equal(a, b) for a, b in zip(host, device, strict=True))


@pytest.mark.parametrize("mistake", [clip, clear, zero_in_place, replace, negate, turn_round])
def test_a_gradient_that_changed_after_its_ballot_left_is_an_error_of_the_next_step(
    mistake: Callable[[Branches, Distributed], None],
) -> None:
    def work(rank: int, group: object) -> str:
        model = copy.deepcopy(MODEL)
        opt = Distributed(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        for step in range(2):
            opt.zero_grad()
            backward(model, rank, step)
            mistake(model, opt) if step == 1 else opt.step()
        opt.zero_grad()
        backward(model, rank, 2)
        with pytest.raises(OverlapError) as caught:
            opt.step()
        return str(caught.value)

    for said in succeed(world(2, work)):
        assert "use overlap=False" in said and "gradient of parameter" in said


def test_steps_are_not_heard_of_while_ballots_are_under_way() -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        opt = Distributed(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        for step in range(2):
            backward(model, rank, step)
            if step == 0:
                opt.step()
        with pytest.raises(OverlapError, match="before backward or after step"):
            opt.check()
        opt.step()
        opt.check()

    succeed(world(2, work))


def test_a_graph_holds_backward_and_step_and_what_is_wrong_is_heard_when_somebody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(rank: int, group: Any) -> str:
        model = copy.deepcopy(MODEL)
        opt = Distributed(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        for step in range(6):
            opt.zero_grad()
            if step == 0:
                backward(model, rank, step)
                opt.step()
                group.barrier().wait()
                monkeypatch.setattr(exchange, "is_captured", lambda device: True)
                group.barrier().wait()
                continue
            if step == 4:
                opt.param_groups[0]["lr"] = 0.5 if rank == 1 else 0.25
            with unread():
                backward(model, rank, step)
                opt.step()
        group.barrier().wait()
        monkeypatch.setattr(exchange, "is_captured", lambda device: False)
        group.barrier().wait()
        with pytest.raises(AgreementError) as caught:
            opt.check()
        assert "on rank 1 group 0 has lr=0.5 instead of 0.25" in str(caught.value)
        assert opt.stats.steps == opt.param_groups[0]["t"] == 5
        return str(caught.value)

    assert len(set(succeed(world(2, work)))) == 1
