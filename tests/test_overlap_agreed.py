"""overlap=True: accumulation, changed gradients, layouts and hyper-parameters that change: it works, or is named."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from branching import MODEL, SMALL, STEPS, Branches, backward, train, under_way, values
from torch import Tensor
from world import succeed, world

from dlion import Distributed, DistributedLion
from dlion.errors import AgreementError, DlionError

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


@pytest.mark.parametrize(("key", "value", "said"), [("lr", 7e-5, "lr=7e-05"), ("betas", (0.8, 0.99), "betas=[0.8")])
def test_hyper_parameters_that_differ_are_named_on_all(key: str, value: object, said: str) -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        for step in range(4):
            if step == 2 and rank == 1:
                opt.param_groups[0][key] = value
            opt.zero_grad()
            backward(model, rank, step)
            opt.step()
            assert step < (3 if key == "lr" else 2)  # what applies verdicts is compared in the step after

    for error in world(3, work):
        assert isinstance(error, AgreementError) and "rank 1" in str(error) and said in str(error)


@pytest.mark.parametrize("without", [None, 1])
def test_learning_rate_and_decay_are_those_of_step_as_without_overlap(without: int | None) -> None:
    """Rank 1 brings no gradient in one of the steps: it reads them when the others do."""

    def work(rank: int, group: object, **options: Any) -> Tensor:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, **options)
        for step in range(5):
            opt.zero_grad()
            if step != 3 or rank != without:
                backward(model, rank, step)
            opt.param_groups[0]["lr"] = 1e-3 * (step + 1)
            opt.param_groups[0]["weight_decay"] = 0.1 * step
            opt.step()
        return values(model)

    wanted = succeed(world(2, work))
    for found in succeed(world(2, lambda rank, group: work(rank, group, overlap=True))):
        assert torch.equal(found, wanted[0])


@pytest.mark.slow
def test_several_optimizers_vote_at_once() -> None:
    """Of equal layouts, brought by backward in an order of its own on every rank."""

    def work(rank: int, group: object, overlaps: tuple[bool, ...], reverse: bool) -> Tensor:
        models = [copy.deepcopy(MODEL) for _ in overlaps]
        opts = [
            DistributedLion(m.parameters(), process_group=group, lr=1e-3, bucket_bytes=SMALL, overlap=overlap)
            for m, overlap in zip(models, overlaps, strict=True)
        ]
        for step in range(6):
            for opt in opts:
                opt.zero_grad()
            for number in (range(len(models)), reversed(range(len(models))))[(rank + step) % 2]:
                backward(models[number], rank, step + number)
            for opt in reversed(opts) if reverse else opts:
                opt.step()
        return torch.cat([values(model) for model in models])

    wanted = succeed(world(3, lambda rank, group: work(rank, group, (False, False, False), False)))[0]
    for overlaps in ((True, True, True), (True, False, True)):
        for reverse in (False, True):
            for found in succeed(world(3, lambda r, g, o=overlaps, b=reverse: work(r, g, o, b))):  # type: ignore[misc]
                assert torch.equal(found, wanted)


def test_workers_must_agree_on_overlap() -> None:
    for error in world(2, lambda rank, group: train(rank, group, overlap=rank == 0)):
        assert isinstance(error, AgreementError) and "overlap" in str(error)


@pytest.mark.slow
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
    assert said[1] == "left" and all("lost another worker: rank 1 did not" in said[rank] for rank in (0, 2))
