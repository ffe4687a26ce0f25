"""overlap=True: ballots leave during backward, and the bits are those without."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from branching import MODEL, SMALL, STEPS, backward, inputs_of, train, under_way, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import succeed, world

from dlion import DistributedLion, local_gradients
from dlion.channel import Call
from dlion.errors import NonFiniteGradientError
from dlion.flight import UnderWay
from dlion.methods import METHODS
from dlion.resident import choice

# ---- the same bits


@pytest.mark.wide(5)
@pytest.mark.parametrize("workers", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if "overlap" in method.options])
def test_the_bits_are_those_without_overlap(method: str, workers: int) -> None:
    options = {"method": method, "bucket_bytes": SMALL if "zeros" in METHODS[method].options else 64 * SMALL}
    plain = succeed(world(workers, lambda rank, group: train(rank, group, **options)))
    overlapped = succeed(world(workers, lambda rank, group: train(rank, group, overlap=True, **options)))
    for (wanted, none, counted), (found, left, counters) in zip(plain, overlapped, strict=True):
        assert torch.equal(wanted, plain[0][0]) and torch.equal(found, wanted)
        assert none == [0] * STEPS
        assert left[0] == 0 and min(left[1:]) > 0  # the first step agrees; afterwards buckets leave in backward
        assert counters == counted


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["sharded", "replicated", "server"])
@pytest.mark.parametrize("zeros", ["balanced", "exact"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_topologies_zeros_and_kernels(topology: str, zeros: str, kernels: str) -> None:
    options = {"topology": topology, "zeros": zeros, "kernels": kernels}
    plain = succeed(world(4, lambda rank, group: train(rank, group, **options)))
    for found, left, _ in succeed(world(4, lambda rank, group: train(rank, group, overlap=True, **options))):
        assert torch.equal(found, plain[0][0]) and min(left[1:]) > 0


@pytest.mark.parametrize("policy", ["abstain", "skip"])
def test_gradients_that_are_not_finite(policy: str) -> None:
    def poison(rank: int) -> Callable[[Tensor], Tensor | None]:
        seen: list[int] = []

        def hook(grad: Tensor) -> Tensor | None:
            seen.append(0)
            return grad * torch.nan if (rank, len(seen)) in ((1, 2), (2, 4)) else None

        return hook

    def work(rank: int, group: object, **options: Any) -> tuple[Tensor, int, int]:
        model = copy.deepcopy(MODEL)
        model.first.weight.register_hook(poison(rank))
        opt = DistributedLion(
            model.parameters(), process_group=group, lr=1e-3, bucket_bytes=SMALL, nonfinite=policy, **options
        )
        for step in range(STEPS):
            opt.zero_grad()
            backward(model, rank, step)
            opt.step()
        return values(model), opt.stats.abstentions, opt.stats.skipped

    plain = succeed(world(3, work))
    overlapped = succeed(world(3, lambda rank, group: work(rank, group, overlap=True)))
    for one, other in zip(plain, overlapped, strict=True):
        assert torch.equal(one[0], other[0]) and one[1:] == other[1:]
        assert one[1] > 0 and (policy == "abstain" or one[2] == 2)


def test_raise_names_the_parameter_and_writes_nothing() -> None:
    def work(rank: int, group: object) -> str:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(
            model.parameters(), process_group=group, bucket_bytes=SMALL, nonfinite="raise", overlap=True
        )
        for step in range(2):
            opt.zero_grad()
            if step == 1 and rank == 1:
                model.last.bias.register_hook(lambda grad: grad * torch.inf)
            backward(model, rank, step)
            before = values(model)
            if step == 0:
                opt.step()
        with pytest.raises(NonFiniteGradientError) as caught:
            opt.step()
        assert torch.equal(values(model), before)
        return str(caught.value)

    for said in succeed(world(3, work)):
        assert "on rank 1" in said


# ---- the order of calls


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Train three workers, with answers that are there at once; of each the bucket and number of every call begun."""
    begun: dict[int, list[tuple[int, int]]] = {}
    resume = UnderWay.resume

    def noted(self: UnderWay) -> None:
        resume(self)
        if self.call is not None:
            begun[threading.get_ident()].append((self.bucket.number, self.calls))

    def work(rank: int, group: object) -> list[tuple[int, int]]:
        begun[threading.get_ident()] = []
        options = {"method": "g-lion", "topology": "sharded", "overlap": True, "bucket_bytes": 64 * SMALL}
        train(rank, group, **options)
        return begun[threading.get_ident()]

    with monkeypatch.context() as patch:
        patch.setattr(UnderWay, "resume", noted)
        patch.setattr(Call, "arrived", lambda self: True)
        return succeed(world(3, work))


def test_where_rows_travel_by_an_accelerator_every_worker_begins_calls_in_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By arrival it would be each worker's own, and two groups of NCCL on one device may then wait for ever."""
    by_arrival = calls_of(monkeypatch)
    monkeypatch.setattr(choice, "is_accelerator", lambda device: True)
    first, *others = calls_of(monkeypatch)
    assert others == [first, first]
    buckets = len({number for number, _ in first})
    assert [call for _, call in first] == ([1] * buckets + [2] * buckets) * STEPS
    assert all([call for _, call in rank] != [call for _, call in first] for rank in by_arrival)


# ---- beside other things that communicate during backward


class MeanOverWorkers(torch.autograd.Function):
    """What SyncBatchNorm does: collectives in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.detach().clone()
        dist.all_reduce(total, group=group)
        return total / group.size()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total / ctx.group.size(), None


@pytest.mark.slow
def test_beside_collectives_in_the_callers_backward() -> None:
    def work(rank: int, group: dist.ProcessGroup, **options: Any) -> tuple[Tensor, int]:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, **options)
        left = 0
        for step in range(8):
            opt.zero_grad()
            hidden = torch.tanh(model.first(inputs_of(rank, step)))
            for _ in range(3):
                hidden = model.shared(torch.tanh(MeanOverWorkers.apply(hidden, group)))
            model.last(hidden + model.sometimes(hidden)).square().mean().backward()
            left += under_way(opt)
            opt.step()
        return values(model), left

    # what comes after the mean is the same on all workers, and so are the gradients there
    with pytest.warns(UserWarning, match="gradients of some parameters were equal on all 3 workers"):
        plain = succeed(world(3, work))
        overlapping = succeed(world(3, lambda rank, group: work(rank, group, overlap=True)))
    for found, left in overlapping:
        assert torch.equal(found, plain[0][0]) and left > 0


@pytest.mark.parametrize("as_view", [False, True])
def test_under_ddp_with_its_no_op_hook(as_view: bool) -> None:
    def work(rank: int, group: dist.ProcessGroup, **options: Any) -> tuple[Tensor, list[int]]:
        model = copy.deepcopy(MODEL)
        model.never.requires_grad_(False)
        wrapped = DistributedDataParallel(
            model, process_group=group, find_unused_parameters=True, gradient_as_bucket_view=as_view
        )
        local_gradients(wrapped, group)
        opt = DistributedLion(model.parameters(), process_group=group, lr=1e-3, bucket_bytes=SMALL, **options)
        left = []
        for step in range(STEPS):
            opt.zero_grad()
            with opt.accumulate(), wrapped.no_sync():
                backward(wrapped, rank, 10 + step)
            backward(wrapped, rank, step)
            left.append(under_way(opt))
            opt.step()
        return values(model), left

    plain = succeed(world(2, work))
    for found, left in succeed(world(2, lambda rank, group: work(rank, group, overlap=True))):
        assert torch.equal(found, plain[0][0]) and min(left[1:]) > 0


# ---- the optimizer's own life


def test_copies_and_pickles_vote_in_backward_too() -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        backward(model, rank, 0)
        opt.step()
        twin_model, twin = copy.deepcopy((model, opt))
        loaded_model, loaded = pickle.loads(pickle.dumps((model, opt)))
        loaded.process_group = group
        for step in range(1, 4):
            for net, optimizer in ((model, opt), (twin_model, twin), (loaded_model, loaded)):
                optimizer.zero_grad()
                backward(net, rank, step)
                assert (under_way(optimizer) > 0) == (step > 1 or optimizer is opt)
                optimizer.step()
        assert torch.equal(values(model), values(twin_model)) and torch.equal(values(model), values(loaded_model))

    succeed(world(2, work))


def test_an_optimizer_that_is_gone_leaves_no_hooks() -> None:
    def work(rank: int, group: object) -> None:
        model = copy.deepcopy(MODEL)
        opt = DistributedLion(model.parameters(), process_group=group, bucket_bytes=SMALL, overlap=True)
        for step in range(2):
            backward(model, rank, step)
            opt.step()
            opt.zero_grad()
        del opt
        gc.collect()
        assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
        backward(model, rank, 2)
        backward(model, rank, 3)

    succeed(world(2, work))


def test_sparse_gradients_are_refused_in_backward() -> None:
    def work(rank: int, group: object) -> str:
        model = nn.Embedding(10, 4, sparse=False)
        nn.init.ones_(model.weight)
        opt = DistributedLion(model.parameters(), process_group=group, overlap=True)
        model(torch.tensor([1, 2])).sum().backward()
        opt.step()
        opt.zero_grad()
        model.sparse = True
        with pytest.raises(ValueError, match="sparse=False") as caught:
            model(torch.tensor([1, 2])).sum().backward()
        return str(caught.value)

    succeed(world(2, work))


@pytest.mark.parametrize("given", ["yes", 1, None])
def test_overlap_must_be_true_or_false(given: object) -> None:
    with pytest.raises(ValueError, match=r"overlap=.* must be True or False"):
        DistributedLion([nn.Parameter(torch.zeros(1))], overlap=given)
