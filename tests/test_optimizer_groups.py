"""Optimizers and their groups: what one worker may do alone, several optimizers on a group, one on several groups."""

import copy
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from world import succeed, world

from dlion import Distributed, DistributedLion
from dlion.errors import AgreementError, ExchangeError, GroupNotReadyError
from dlion.voting import wait_for_all

MODEL = nn.Sequential(nn.Linear(5, 70), nn.Linear(70, 3))


def train(optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_an_explicit_group_is_shared_by_a_deep_copy_and_lost_by_a_pickle() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)
        train(optimizer, range(rank, rank + 2))
        twin, mirror = copy.deepcopy((model, optimizer))
        assert mirror.process_group is group
        train(mirror, range(rank, rank + 1))

        twice = pickle.dumps(pickle.loads(pickle.dumps((model, optimizer))))
        third, other = pickle.loads(twice)
        for _ in range(2):
            with pytest.raises(GroupNotReadyError, match=r"optimizer\.process_group"):
                train(other, range(1))
        other.process_group = group
        train(other, range(rank, rank + 1))
        assert torch.equal(flat(twin), flat(third)) and other.param_groups[0]["t"] == 3

    succeed(world(2, work))


def test_one_worker_alone_may_load_save_and_copy() -> None:
    """Nothing here communicates; a load of what is there changes nothing for the others."""

    def work(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)
        if rank == 0:
            optimizer.load_state_dict(optimizer.state_dict())
            dcp.get_optimizer_state_dict(model, optimizer)
        train(optimizer, range(rank, rank + 3))
        if rank == 0:
            optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
            dcp.get_optimizer_state_dict(model, optimizer)
            copy.deepcopy(optimizer)
        train(optimizer, range(rank, rank + 3))
        if rank == 1:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
            optimizer.param_groups.pop()
            optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer)).state_dict())
        train(optimizer, range(rank, rank + 3))
        assert optimizer.param_groups[0]["t"] == 9
        return flat(model)

    a, b = succeed(world(2, work))
    assert torch.equal(a, b)


def test_a_checkpoint_loaded_by_one_worker_alone_is_named() -> None:
    saver = DistributedLion(copy.deepcopy(MODEL).parameters(), lr=0.01)
    train(saver, range(5))
    saved = saver.state_dict()

    def work(rank: int, group: dist.ProcessGroup) -> None:
        optimizer = DistributedLion(copy.deepcopy(MODEL).parameters(), lr=0.01, process_group=group)
        if rank == 1:
            optimizer.load_state_dict(saved)
        train(optimizer, range(1))

    for error in world(2, work):
        assert isinstance(error, AgreementError) and "rank 1" in str(error) and "t=5" in str(error)


def test_two_optimizers_share_a_group() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        models = [copy.deepcopy(MODEL) for _ in range(2)]
        lion = DistributedLion(models[0].parameters(), lr=0.01, process_group=group, topology="sharded")
        adam = Distributed(models[1].parameters(), "g-adamw", lr=0.01, process_group=group)
        for seed in range(3):
            train(lion, range(seed + rank, seed + rank + 1))
            train(adam, range(seed + rank, seed + rank + 1))
        assert lion.stats.bytes_sent < adam.stats.bytes_sent
        return flat(models[0]), flat(models[1])

    first, *others = succeed(world(3, work))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(*first)


def test_one_optimizer_goes_on_with_another_group() -> None:
    """Three workers, then two of them in a new world: the momentum of those who stay is their own."""
    made = [(model, DistributedLion(model.parameters(), lr=0.01)) for model in (copy.deepcopy(MODEL) for _ in range(3))]

    def work(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model, optimizer = made[rank]
        optimizer.process_group = group
        train(optimizer, range(rank, rank + 2))
        return flat(model)

    succeed(world(3, work))
    momentum = made[1][1].state[made[1][0][0].weight]["exp_avg"]
    before = momentum.clone()
    a, b = succeed(world(2, work))
    assert torch.equal(a, b) and made[1][1].param_groups[0]["t"] == 4
    assert made[1][1].state[made[1][0][0].weight]["exp_avg"] is momentum and not torch.equal(momentum, before)
    assert made[2][1].param_groups[0]["t"] == 2


def test_workers_that_trained_alone_first_are_found_out() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        optimizer = DistributedLion(copy.deepcopy(MODEL).parameters(), lr=0.01)
        train(optimizer, range(rank, rank + 1))
        optimizer.process_group = group
        train(optimizer, range(rank, rank + 1))

    for error in world(2, work):
        assert isinstance(error, AgreementError) and "parameters differ before the first step" in str(error)


def test_every_worker_may_close_over_its_own_batch() -> None:
    inputs = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))

    def work(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs[rank]).square().mean()
            loss.backward()
            return loss

        losses = torch.stack([optimizer.step(closure).detach() for _ in range(5)])
        return losses, flat(model)

    (first, a), (second, b) = succeed(world(2, work))
    assert torch.equal(a, b) and not torch.equal(first, second)
    assert first[-1] < first[0] and second[-1] < second[0]


def test_a_group_added_by_all_goes_on_and_by_one_is_named() -> None:
    def work(rank: int, group: dist.ProcessGroup, only: int | None) -> torch.Tensor:
        model, more = copy.deepcopy(MODEL), nn.Parameter(torch.zeros(7))
        optimizer = DistributedLion(model.parameters(), lr=0.01, process_group=group)
        train(optimizer, range(rank, rank + 2))
        if only is None or rank == only:
            optimizer.add_param_group({"params": [more], "lr": 0.5})
        train(optimizer, range(rank, rank + 1))
        assert [g["t"] for g in optimizer.param_groups] == [3, 3]
        assert torch.equal(optimizer.state[more]["exp_avg"], more.grad * (1 - 0.99))
        return torch.cat([flat(model), more.detach()])

    a, b = succeed(world(2, lambda rank, group: work(rank, group, None)))
    assert torch.equal(a, b) and a[-7:].abs().tolist() == [0.5] * 7
    for error in world(2, lambda rank, group: work(rank, group, 1)):
        assert isinstance(error, AgreementError) and "rank 1" in str(error) and "group 1" in str(error)


def test_a_shape_that_changes_on_one_worker_is_named_though_its_size_is_the_same() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = DistributedLion(model.named_parameters(), lr=0.01, process_group=group)
        train(optimizer, range(rank, rank + 1))
        if rank == 1:
            model.zero_grad()
            model[1].weight.data = model[1].weight.data.t()
        train(optimizer, range(rank, rank + 1))

    for error in world(2, work):
        assert isinstance(error, AgreementError)
        assert "rank 1" in str(error) and "1.weight [70, 3] float32" in str(error)


@pytest.mark.slow
def test_a_store_whose_keeper_ended_is_an_exchange_error() -> None:
    """Rank 0 keeps the store of most process groups; where it ends before the first step, the others say so."""
    keeper = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", keeper.port, 2, False, wait_for_workers=False)
    group = dist.ProcessGroup(store, 1, 2)
    group._set_group_name("orphan")
    del keeper
    with pytest.raises(ExchangeError, match=r"rank 1 of 2 lost the process group's store.*rank 0"):
        wait_for_all(group, "begin", timedelta(seconds=5))


def test_a_default_device_and_dtype_of_the_user_change_nothing() -> None:
    def run(kernels: str) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(70, device="cpu", dtype=torch.float32))
        optimizer = DistributedLion([p], lr=0.5, kernels=kernels)
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return p.detach()

    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            seen = [run(kernels) for kernels in ("auto", "reference")]
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(p, torch.zeros(70)) for p in seen)
