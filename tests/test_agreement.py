"""Workers that do not train the same thing find out within seconds; every rank names the rank and what differs."""

import copy
import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from world import gloo_group, succeed, world

from dlion import Distributed, DistributedLion
from dlion.errors import AgreementError, ExchangeError
from dlion.voting import adopt

SECONDS = 12


def make_model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3))
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator)
    return model


MODEL = make_model()


def step(model: nn.Module, opt: torch.optim.Optimizer, seed: int) -> None:
    opt.zero_grad()
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    opt.step()


def errors(workers: int, work: Callable[[int, object], object], kind: type[Exception] = AgreementError) -> list[str]:
    """What every rank raised; fails if one did not, or took long."""
    began = time.monotonic()
    results = world(workers, work)
    assert time.monotonic() - began < SECONDS
    assert all(isinstance(result, kind) for result in results), results
    return [str(result) for result in results]


@pytest.mark.parametrize("topology", ["sharded", "replicated", "server"])
@pytest.mark.parametrize("named", [True, False])
def test_one_frozen_layer_is_named_on_every_rank(topology: str, named: bool) -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        if rank == 1:
            model[2].requires_grad_(False)
        params = model.named_parameters() if named else model.parameters()
        step(model, DistributedLion(params, process_group=group, topology=topology), rank)

    for text in errors(3, work):
        assert "rank 1" in text and "frozen" in text
        assert ("2.weight" if named else "parameter 2 of group 0") in text


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("topology", ["sharded", "replicated", "server"])
@pytest.mark.parametrize("frozen_rank", [0, 1])
def test_a_layer_frozen_on_one_rank_after_ten_steps(topology: str, workers: int, frozen_rank: int) -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.named_parameters(), process_group=group, topology=topology)
        for number in range(10):
            step(model, opt, 10 * number + rank)
        assert opt.param_groups[0]["t"] == 10
        before = opt.state[model[0].weight]["exp_avg"].clone()
        if rank == frozen_rank:
            model[2].requires_grad_(False)
        try:
            step(model, opt, rank)
        finally:
            assert rank != frozen_rank or torch.equal(before, opt.state[model[0].weight]["exp_avg"])

    for text in errors(workers, work):
        assert f"the layout changed on rank {frozen_rank} alone after t=10" in text and "2.weight" in text


@pytest.mark.parametrize("method", ["dlion-mavo", "g-lion", "g-adamw"])
def test_a_layout_changed_on_all_ranks_goes_on(method: str) -> None:
    def work(rank: int, group: object) -> tuple[list[torch.Tensor], int]:
        model = copy.deepcopy(MODEL)
        opt = Distributed(model.named_parameters(), method, lr=1e-3, process_group=group)
        for number in range(30):
            if number == 10:
                model[2].requires_grad_(False)
            if number == 20:
                model[2].requires_grad_(True)
                extra = nn.Parameter(torch.ones(5))
                opt.add_param_group({"params": [("extra", extra)], "lr": 1e-2})
            step(model, opt, 100 * number + rank)
        return [p.detach() for p in model.parameters()] + [extra.detach()], opt.param_groups[1]["t"]

    ranks = succeed(world(3, work))
    for params, t in ranks:
        assert t == 30
        assert all(torch.equal(a, b) for a, b in zip(params, ranks[0][0], strict=True))


def test_replicas_from_different_seeds_are_refused_before_the_first_step() -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        if rank in (1, 3):
            model[0].weight.data += rank
        step(model, DistributedLion(model.parameters(), process_group=group), rank)

    for text in errors(5, work):
        assert "parameters differ before the first step: those of ranks 1, 3 are not those of rank 0" in text
        assert "dlion.local_gradients(model)" in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ties": "alternate"}, "ties='alternate' instead of 'rotate'"),
        ({"topology": "server"}, "topology='server' instead of 'auto'"),
        ({"zeros": "exact"}, "zeros='exact'"),
        ({"nonfinite": "skip"}, "nonfinite='skip'"),
        ({"verify_every": 10}, "verify_every=10 instead of 100"),
        ({"on_mismatch": "repair"}, "on_mismatch='repair' instead of 'raise'"),
        ({"bucket_bytes": 800}, "bucket_bytes=800 instead of 1048576"),
        ({"vote": "average"}, "method='dlion-avg'"),
    ],
)
def test_different_options_are_named(options: dict[str, object], named: str) -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        step(model, DistributedLion(model.parameters(), process_group=group, **(options if rank == 2 else {})), rank)

    for text in errors(3, work):
        assert "on rank 2 " + named in text


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("lr", 0.5, "lr=0.5 instead of 0.0001"),
        ("weight_decay", 0.1, "weight_decay=0.1"),
        ("betas", (0.8, 0.9), "betas"),
    ],
)
@pytest.mark.parametrize("topology", ["sharded", "replicated", "server"])
def test_hyper_parameters_that_drift_apart_are_named(topology: str, key: str, value: object, named: str) -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, topology=topology)
        for number in range(5):
            if number == 3 and rank == 1:
                opt.param_groups[0][key] = value
            step(model, opt, 10 * number + rank)

    for text in errors(3, work):
        assert "on rank 1 group 0 has " + named in text


def test_a_different_step_count_is_named() -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group)
        opt.param_groups[0]["t"] = 7 if rank == 0 else 8
        step(model, opt, rank)

    for text in errors(3, work):
        assert "on rank 0 t=7 steps were applied instead of 8" in text


def test_a_rank_without_trainable_parameters_is_named() -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        if rank == 1:
            model.requires_grad_(False)
            DistributedLion(model.parameters(), process_group=group).step()
        step(model, DistributedLion(model.parameters(), process_group=group), rank)

    for text in errors(2, work):
        assert "rank 1 there are 0 trainable parameters instead of 6" in text


def test_equal_shapes_frozen_on_different_ranks_are_found() -> None:
    def work(rank: int, group: object) -> None:
        params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
        params[rank].requires_grad_(False)
        DistributedLion(params, process_group=group).step()

    for text in errors(2, work):
        assert "rank 1" in text and "parameter 0 of group 0 [4] float32 is trainable but should be frozen" in text


def test_who_does_not_come_is_named() -> None:
    def work(rank: int, group: object) -> None:
        if rank == 1:
            return
        model = copy.deepcopy(MODEL)
        step(model, DistributedLion(model.parameters(), process_group=group), rank)

    results = world(3, work, seconds=2)
    assert results[1] is None
    for rank in (0, 2):
        said = "rank 1 did not arrive within 2."  # groups that were adopted: tests/test_processes.py has torch's
        assert isinstance(results[rank], ExchangeError) and said in str(results[rank])


def test_replaced_parameters_of_equal_layout_need_no_agreement() -> None:
    """Frameworks swap the parameters of one rank's groups for others of the same shapes; nobody else must notice."""

    def work(rank: int, group: object) -> list[torch.Tensor]:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group)
        for number in range(4):
            if number == 2 and rank == 1:
                twin = copy.deepcopy(model)
                for old, new in zip(model.parameters(), twin.parameters(), strict=True):
                    opt.state[new] = opt.state.pop(old)
                opt.param_groups[0]["params"] = list(twin.parameters())
                model = twin
            step(model, opt, 10 * number + rank)
        return [p.detach() for p in model.parameters()]

    ranks = succeed(world(3, work))
    assert all(torch.equal(a, b) for rank in ranks for a, b in zip(rank, ranks[0], strict=True))


@pytest.mark.parametrize("method", ["dlion-mavo", "g-adamw"])
def test_loading_a_state_on_one_worker_alone_is_no_difference(method: str) -> None:
    """torch adds a default when it loads a state dict; that is no hyper-parameter on which workers must agree."""

    def work(rank: int, group: object) -> int:
        model = copy.deepcopy(MODEL)
        opt = Distributed(model.parameters(), method, lr=1e-3, process_group=group)
        if rank == 1:
            opt.load_state_dict(opt.state_dict())
        for number in range(2):
            step(model, opt, 10 * number + rank)
        if rank == 0:
            opt.load_state_dict(opt.state_dict())
        step(model, opt, rank)
        return opt.param_groups[0]["t"]

    assert succeed(world(2, work)) == [3, 3]


@pytest.mark.parametrize("method", ["g-lion", "g-adamw"])
def test_a_state_that_must_be_shared_and_is_not_is_refused(method: str) -> None:
    """Momenta of a voting method differ between workers: with them replicas of a global method would train apart."""

    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        twin = copy.deepcopy(MODEL)
        own = torch.optim.AdamW(twin.parameters())
        step(twin, own, 0)
        for saved in own.state.values():
            saved["exp_avg"].fill_(1.0 if rank == 1 else 2.0)
        opt = Distributed(model.parameters(), method, process_group=group)
        opt.load_state_dict(own.state_dict())
        step(model, opt, rank)

    for text in errors(3, work):
        assert "state" in text and "that of rank 1 is not that of rank 0" in text and method in text


def test_groups_that_are_destroyed_end_although_an_optimizer_lives() -> None:
    """Their threads aborted finished processes when the interpreter was taken down before they ended."""

    def work(rank: int, group: object) -> str:
        store = group.get_group_store()
        pair = []

        def make(name: str) -> object:
            pair.append(gloo_group(store, name, rank, 2, 30))
            return pair[-1]

        adopt(group, make)
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, timeout=30, topology="sharded")
        step(model, opt, rank)
        watched = [weakref.ref(one) for one in pair]
        assert len(watched) == 2
        pair.clear()
        gc.collect()
        assert [ref() for ref in watched] == [None, None]
        with pytest.raises(ExchangeError) as error:
            step(model, opt, rank)
        return str(error.value)

    assert all("the process group was destroyed" in text for text in succeed(world(2, work)))
