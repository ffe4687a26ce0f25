"""overlap=True: accumulation, changed gradients, layouts and hyper-parameters that change: it works, or is named."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from branching import MODEL, SMALL, STEPS, Branches, backward, inputs_of, train, under_way, values
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed, DistributedLion
from dlion.errors import AgreementError, DlionError, OverlapError

# ---- gradient accumulation


def accumulated(rank: int, group: object, **options: Any) -> tuple[Tensor, list[int]]:
    model = copy.deepcopy(MODEL)
    opt = DistributedLion(model.parameters(), process_group=group, lr=1e-3, bucket_bytes=SMALL, **options)
    left = []
    for step in range(STEPS):
        opt.zero_grad()
        with opt.accumulate():
            backward(model, rank, 3 * step)
            backward(model, rank, 3 * step + 1)
            left.append(under_way(opt))
        backward(model, rank, 3 * step + 2)
        left.append(under_way(opt))
        opt.step()
    return values(model), left


def test_only_the_last_backward_pass_votes() -> None:
    plain = succeed(world(3, accumulated))
    for found, left in succeed(world(3, lambda rank, group: accumulated(rank, group, overlap=True))):
        assert torch.equal(found, plain[0][0])
        assert left[0::2] == [0] * STEPS and min(left[3::2]) > 0


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


@pytest.mark.parametrize("mistake", [clip, clear, zero_in_place, replace, again])
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


def test_a_scaler_that_skips_a_step_is_refused_in_the_next_backward() -> None:
    def work(rank: int, group: object) -> str:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        with pytest.raises(OverlapError) as caught:
            for step in range(3):
                opt.zero_grad()
                loss = model(inputs_of(rank, step), True).square().mean()
                scaler.scale(loss * (torch.inf if step == 1 else 1)).backward()
                scaler.step(opt)
                scaler.update()
        assert step == 2
        return str(caught.value)

    assert all("gradient scaler" in said and "overlap=False" in said for said in succeed(world(2, work)))


# ---- layouts and hyper-parameters


def freeze(layer: str, when: int, ranks: tuple[int, ...], rank: int) -> Callable[[int, Branches, Distributed], None]:
    def change(step: int, model: Branches, opt: Distributed) -> None:
        if step == when and rank in ranks:
            getattr(model, layer).requires_grad_(False)

    return change


def test_a_layer_that_every_worker_freezes_after_backward_still_takes_that_step() -> None:
    everyone = (0, 1, 2)
    plain = succeed(world(3, lambda r, g: train(r, g, freeze("last", STEPS, everyone, r))))
    late = succeed(world(3, lambda r, g: train(r, g, freeze("last", STEPS - 1, everyone, r), overlap=True)))
    assert all(torch.equal(found, plain[0][0]) for found, _, _ in late)


def frozen_before(rank: int, group: object, **options: Any) -> tuple[Tensor, list[int]]:
    model = copy.deepcopy(MODEL)
    opt = DistributedLion(model.parameters(), process_group=group, lr=1e-3, bucket_bytes=SMALL, **options)
    left = []
    for step in range(5):
        model.shared.requires_grad_(step != 2)
        opt.zero_grad()
        backward(model, rank, step)
        left.append(under_way(opt))
        opt.step()
    return values(model), left


def test_layouts_that_change_on_every_worker_are_agreed_again() -> None:
    plain = succeed(world(3, frozen_before))
    for found, left in succeed(world(3, lambda rank, group: frozen_before(rank, group, overlap=True))):
        assert torch.equal(found, plain[0][0])
        assert [count > 0 for count in left] == [False, True, False, False, True]


@pytest.mark.parametrize("topology", ["sharded", "replicated", "server"])
def test_a_layer_frozen_on_one_worker_is_named_on_all(topology: str) -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(
            model.named_parameters(), process_group=group, bucket_bytes=SMALL, topology=topology, overlap=True
        )
        for step in range(3):
            if step == 2 and rank == 1:
                model.shared.requires_grad_(False)
            opt.zero_grad()
            backward(model, rank, step)
            opt.step()

    for error in world(3, work):
        assert isinstance(error, AgreementError) and "rank 1" in str(error) and "shared.weight" in str(error)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_mistake_that_was_named_can_be_mended(overlap: bool) -> None:
    def work(rank: int, group: object) -> Tensor:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=overlap)
        for number in range(6):
            model.shared.requires_grad_(rank != 1 or number != 3)
            try:
                opt.zero_grad()
                backward(model, rank, number)
                opt.step()
            except AgreementError:
                assert number == 3
            else:
                assert number != 3
        assert opt.param_groups[0]["t"] == 5
        return values(model)

    ranks = succeed(world(3, work))
    assert all(torch.equal(ranks[0], params) for params in ranks)


def test_learning_rates_that_differ_are_named_on_all() -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        for step in range(3):
            if step == 2 and rank == 1:
                opt.param_groups[0]["lr"] = 7e-5
            opt.zero_grad()
            backward(model, rank, step)
            opt.step()

    for error in world(3, work):
        assert isinstance(error, AgreementError) and "rank 1" in str(error) and "7e-05" in str(error)


def test_hyper_parameters_are_those_of_when_backward_began() -> None:
    def late(step: int, model: Branches, opt: Distributed) -> None:
        opt.param_groups[0]["lr"] = 1e-3 if step == STEPS - 1 else 1e-3 * (step + 2)

    def early(rank: int, group: object) -> Tensor:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, lr=1e-3, bucket_bytes=SMALL)
        for step in range(STEPS):
            opt.param_groups[0]["lr"] = 2e-3 if step == 0 else 1e-3 * (step + 1)  # the first step is not overlapped
            opt.zero_grad()
            backward(model, rank, step)
            opt.step()
        return values(model)

    wanted = succeed(world(2, early))[0]
    for found, _, _ in succeed(world(2, lambda rank, group: train(rank, group, late, overlap=True))):
        assert torch.equal(found, wanted)


def test_workers_must_agree_on_overlap() -> None:
    for error in world(2, lambda rank, group: train(rank, group, overlap=rank == 0)):
        assert isinstance(error, AgreementError) and "overlap" in str(error)


def test_a_lost_worker_ends_the_others_backward_or_step() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        for step in range(3):
            if step == 2 and rank == 1:
                return "left"
            opt.zero_grad()
            try:
                backward(model, rank, step)
                opt.step()
            except DlionError as error:
                return str(error)
        return "nothing was wrong"

    said = succeed(world(3, work, seconds=1))
    assert said[1] == "left" and all("lost another worker" in said[rank] for rank in (0, 2))
