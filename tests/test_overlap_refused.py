"""overlap=True: what changes after ballots have left is refused, in one sentence that names the way out."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from branching import MODEL, SMALL, Branches, backward, inputs_of, train, values
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed, DistributedLion
from dlion.errors import OverlapError


def refused(rank: int, group: object, mistake: Callable[[Branches, Distributed], None]) -> tuple[str, bool]:
    """What the second step's error says, when `mistake` follows its backward; and whether parameters moved."""
    model = copy.deepcopy(MODEL)
    opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
    backward(model, rank, 0)
    opt.step()
    opt.zero_grad()
    before = values(model)
    backward(model, rank, 1)
    with pytest.raises(OverlapError) as caught:
        mistake(model, opt)
    return str(caught.value), torch.equal(values(model), before)


def clip(model: Branches, opt: Distributed) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    opt.step()


def clear(model: Branches, opt: Distributed) -> None:
    opt.zero_grad()
    opt.step()


def zero_in_place(model: Branches, opt: Distributed) -> None:
    opt.zero_grad(set_to_none=False)
    opt.step()


def replace(model: Branches, opt: Distributed) -> None:
    model.last.bias.grad = model.last.bias.grad * 2
    opt.step()


def again(model: Branches, opt: Distributed) -> None:
    backward(model, 0, 2)


def negate(model: Branches, opt: Distributed) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.neg_()
    opt.step()


def turn_round(model: Branches, opt: Distributed) -> None:
    model.last.weight.grad.copy_(model.last.weight.grad.flip(0))
    opt.step()


@pytest.mark.parametrize("mistake", [clip, clear, zero_in_place, replace, negate, turn_round, again])
def test_a_gradient_that_changed_after_its_ballot_left(mistake: Callable[[Branches, Distributed], None]) -> None:
    for said, unmoved in succeed(world(2, lambda rank, group: refused(rank, group, mistake))):
        assert unmoved and "use overlap=False" in said and "gradient of parameter" in said
        assert ("accumulate" in said) == (mistake is again)


@pytest.mark.parametrize("rewrite", ["in place", "a new tensor"])
def test_a_gradient_written_again_with_the_same_values_is_the_same(rewrite: str) -> None:
    def change(step: int, model: Branches, opt: Distributed) -> None:
        for param in model.parameters():
            if param.grad is not None and rewrite == "in place":
                param.grad.copy_(param.grad.clone())
            elif param.grad is not None:
                param.grad = param.grad.clone()

    wanted = succeed(world(2, lambda rank, group: train(rank, group)))[0][0]
    for found, left, _ in succeed(world(2, lambda rank, group: train(rank, group, change, overlap=True))):
        assert torch.equal(found, wanted) and min(left[1:]) > 0


@pytest.mark.parametrize("explicit", [True, False])
def test_a_gradient_scaler_is_refused(explicit: bool) -> None:
    def work(rank: int, group: object) -> str:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with pytest.raises(OverlapError) as caught:
            for step in range(2):
                opt.zero_grad()
                scaler.scale(model(inputs_of(rank, step), True).square().mean()).backward()
                if explicit:
                    scaler.unscale_(opt)
                scaler.step(opt)
                scaler.update()
        return str(caught.value)

    assert all("use overlap=False" in said for said in succeed(world(2, work)))


def test_a_scaler_is_refused_in_its_first_step() -> None:
    def work(rank: int, group: object) -> str:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        with pytest.raises(OverlapError) as caught:
            for step in range(3):
                opt.zero_grad()
                scaler.scale(model(inputs_of(rank, step), True).square().mean()).backward()
                scaler.step(opt)
                scaler.update()
        assert step == 0
        return str(caught.value)

    assert all("gradient scaler" in said and "overlap=False" in said for said in succeed(world(2, work)))


def test_a_state_loaded_after_ballots_left_is_refused() -> None:
    def load(model: Branches, opt: Distributed) -> None:
        opt.load_state_dict(opt.state_dict())

    def work(rank: int, group: object) -> str:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        for step in range(2):
            backward(model, rank, step)
            if step == 0:
                opt.step()
        with pytest.raises(OverlapError) as caught:
            load(model, opt)
        return str(caught.value)

    assert all("load it before backward" in said for said in succeed(world(2, work)))


def test_a_backward_pass_that_failed_before_any_ballot_left_can_be_repeated() -> None:
    def work(rank: int, group: object, **options: Any) -> Tensor:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, lr=1e-3, **options)  # one bucket
        for step in range(4):
            for attempt in range(2):
                opt.zero_grad()
                fail = model.first.weight.register_hook(lambda grad: 1 / 0) if attempt == 0 and step == 2 else None
                try:
                    backward(model, rank, step)
                    break
                except ZeroDivisionError:
                    assert fail is not None
                    fail.remove()
            opt.step()
        return values(model)

    wanted = succeed(world(2, work))[0]
    assert all(torch.equal(x, wanted) for x in succeed(world(2, lambda r, g: work(r, g, overlap=True))))
