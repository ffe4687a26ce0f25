"""What is compared with a worker that has finished, what it is told in the end, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import lr_scheduler
from uneven import LR, UNEVEN, Net, ranks_of_threads
from world import succeed, world

from dlion import Distributed
from dlion.errors import AgreementError, GroupNotReadyError, NonFiniteGradientError
from dlion.header import BallotHeader, Status, judge


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_of_threads(monkeypatch)


def failed(change: Callable[[int, int, Distributed], None], **options: Any) -> list[str]:
    """What every rank says when `change(rank, step, optimizer)` went before each step."""

    def work(rank: int, group: Any) -> str:
        net = Net()
        optimizer = Distributed(net.named_parameters(), lr=LR, process_group=group, **options)
        with pytest.raises((AgreementError, NonFiniteGradientError)) as caught:
            with Join([optimizer]):
                for step in range((2, 6, 6)[rank]):
                    net.backward(rank, step)
                    change(rank, step, optimizer)
                    optimizer.step()
        return str(caught.value)

    return list(succeed(world(3, work)))


def test_learning_rates_of_workers_with_data_are_compared_still() -> None:
    def change(rank: int, step: int, optimizer: Distributed) -> None:
        optimizer.param_groups[0]["lr"] = LR / (step + 1) if (rank, step) != (2, 4) else 1.0

    for said in failed(change):
        assert "on rank 2 group 0 has lr=1.0 instead of 0.002 (compared with rank 0)" in said
        assert "on rank 0" not in said and "on rank 1" not in said


def test_step_counts_are_compared_with_who_has_finished_too() -> None:
    def change(rank: int, step: int, optimizer: Distributed) -> None:
        if (rank, step) == (2, 3):
            optimizer.param_groups[0]["t"] = 7

    assert all("on rank 2 t=7 steps were applied instead of 3" in said for said in failed(change))


def test_gradients_of_who_has_finished_are_not_blamed() -> None:
    def change(rank: int, step: int, optimizer: Distributed) -> None:
        if (rank, step) in ((1, 4), (0, 1)):
            params = optimizer.param_groups[0]["params"]
            params[1].grad = torch.full_like(params[1], torch.nan if rank == 1 else 1e30)
        if (rank, step) == (0, 1):
            # what is left in its gradients when it has finished
            optimizer.register_step_post_hook(lambda *_: params[1].grad.fill_(torch.inf))

    for said in failed(change, nonfinite="raise"):
        assert "the gradient is not finite in values.1 on rank 1 at step t=4" in said and "rank 0" not in said


def test_a_layout_that_changes_when_somebody_has_finished_is_named() -> None:
    def change(rank: int, step: int, optimizer: Distributed) -> None:
        if step == 3:
            optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(3)))]})

    assert all("the layout changed on ranks 1, 2 alone" in said for said in failed(change))


def test_a_ballot_of_a_finished_worker_is_an_abstention_with_any_hyper_parameters() -> None:
    def header(status: Status, hyper: int, t: int = 5) -> BallotHeader:
        return BallotHeader(status, 0, t, 77, hyper)

    ok = header(Status.OK, 1)
    verdict, voters = judge([header(Status.FINISHED, 9), ok, ok], ok)
    assert (verdict.status, verdict.voters, verdict.abstentions, voters) == (Status.OK, 2, 1, [1, 2])
    alone, voters = judge([header(Status.FINISHED, 9), header(Status.FINISHED, 8)], ok)
    assert (alone.status, alone.voters, voters) == (Status.OK, 0, [])
    late, _ = judge([header(Status.FINISHED, 9, t=4), ok, ok], ok)
    assert (late.status, late.offender) == (Status.HYPERPARAMETERS_DIFFER, 0)
    other, _ = judge([header(Status.FINISHED, 1), ok, ok, header(Status.OK, 2)], ok)
    assert (other.status, other.offender) == (Status.HYPERPARAMETERS_DIFFER, 3)


# ---- schedules

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "steps": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 7], 0.1),
    "cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20, cycle_momentum=False),
    "one after another": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, 10)], [3]
    ),
    "chained": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, total_iters=4), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_go_on_as_those_of_who_finished_last(schedule: str, tensor: bool) -> None:
    def work(rank: int, group: Any) -> list[float]:
        net = Net()
        rate = torch.tensor(LR) if tensor else LR
        optimizer = Distributed(net.parameters(), lr=rate, process_group=group)
        scheduler = SCHEDULES[schedule](optimizer)
        rates = []
        for begin, ends in ((0, UNEVEN), (6, (9, 9, 9, 8))):
            with Join([optimizer], schedulers=[scheduler]):
                for step in range(begin, ends[rank]):
                    net.backward(rank, step)
                    optimizer.step()
                    scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step()
        return [*rates, float(optimizer.param_groups[0]["lr"]), isinstance(optimizer.param_groups[0]["lr"], Tensor)]

    found = succeed(world(len(UNEVEN), work))
    assert all(rates == found[1] for rates in found) and len(set(found[1][:3])) > 1
    assert found[0][3] == tensor


def test_what_is_no_scheduler_and_no_group_are_refused() -> None:
    net = Net()
    optimizer = Distributed(net.parameters())
    with pytest.raises(GroupNotReadyError, match="no process group exists"):
        Join([optimizer])
    for wrong in (3, [3], lr_scheduler.ConstantLR(optimizer)):
        with pytest.raises(ValueError, match="must be a list of learning rate schedulers"):
            Join([optimizer], schedulers=wrong)
