"""overlap=True: ballots leave during backward, the bits are those without, and what it cannot do it says."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import succeed, world

from dlion import Distributed, DistributedLion, local_gradients
from dlion.errors import AgreementError, DlionError, NonFiniteGradientError, OverlapError
from dlion.methods import METHODS

STEPS = 4
SMALL = 16  # bytes of a bucket: 128 elements, so that the model below has fourteen


class Branches(nn.Module):
    """Used twice: `shared`; used by some ranks in some steps: `sometimes`; used by nobody: `never`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Linear(9, 70)
        self.never = nn.Linear(3, 3)
        self.shared = nn.Linear(70, 70, bias=False)
        self.sometimes = nn.Linear(70, 70, bias=False)
        self.last = nn.Linear(70, 4)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.1

    def forward(self, inputs: Tensor, branch: bool) -> Tensor:
        hidden = self.shared(torch.tanh(self.shared(torch.tanh(self.first(inputs)))))
        return self.last(torch.tanh(self.sometimes(hidden) if branch else hidden))


MODEL = Branches()


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(8, 9, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: Any, rank: int, step: int) -> None:
    model(inputs_of(rank, step), branch=(rank + step) % 3 == 0).square().mean().backward()


def under_way(opt: Distributed) -> int:
    return len(opt._exchange.flight) if opt._exchange is not None else 0


def train(
    rank: int,
    group: object,
    change: Callable[[int, Branches, Distributed], None] | None = None,
    cls: Any = Distributed,
    **options: Any,
) -> tuple[Tensor, list[int], dict[str, Any]]:
    """Parameters after STEPS, the buckets that were under way after each backward, and the counters."""
    model = copy.deepcopy(MODEL)
    opt = cls(model.parameters(), process_group=group, **{"lr": 1e-3, "bucket_bytes": SMALL, **options})
    left = []
    for step in range(STEPS):
        opt.zero_grad()
        backward(model, rank, step)
        left.append(under_way(opt))
        if change is not None:
            change(step, model, opt)
        opt.step()
        assert under_way(opt) == 0
    return values(model), left, opt.stats.state_dict()


# ---- the same bits


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("method", METHODS)
def test_the_bits_are_those_without_overlap(method: str, workers: int) -> None:
    options = {"method": method, "bucket_bytes": SMALL if method.startswith("dlion") else 64 * SMALL}
    plain = succeed(world(workers, lambda rank, group: train(rank, group, **options)))
    overlapped = succeed(world(workers, lambda rank, group: train(rank, group, overlap=True, **options)))
    for (wanted, none, counted), (found, left, counters) in zip(plain, overlapped, strict=True):
        assert torch.equal(wanted, plain[0][0]) and torch.equal(found, wanted)
        assert none == [0] * STEPS
        assert left[0] == 0 and min(left[1:]) > 0  # the first step agrees; afterwards buckets leave in backward
        assert counters == counted


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

    plain = succeed(world(3, work))
    for found, left in succeed(world(3, lambda rank, group: work(rank, group, overlap=True))):
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
