"""One bit of one replica changes: it is found, named and mended bitwise, whatever the path."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from world import succeed, world

from dlion import Distributed, DistributedLion
from dlion.errors import AgreementError, ExchangeError, OverlapError
from dlion.simulate import Simulation

EVERY = 3
FLIPPED = "2.weight"
PATHS = {
    "fused": {},
    "generic": {"kernels": "reference"},
    "overlap": {"overlap": True},
    "sharded": {"topology": "sharded"},
    "replicated": {"topology": "replicated"},
    "server": {"topology": "server"},
    "average": {"method": "dlion-avg", "nonfinite": "skip"},
    "g-lion": {"method": "g-lion"},
    "g-adamw": {"method": "g-adamw"},
}


def make_model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 70), nn.ReLU(), nn.Linear(70, 3))
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator)
    return model


MODEL = make_model()


def backward(model: nn.Module, seed: int) -> None:
    model.zero_grad()
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def flip(tensor: Tensor, element: int = 5, bit: int = 1) -> None:
    tensor.detach().view(-1).view(torch.int32)[element : element + 1] ^= 1 << bit


def trained(
    rank: int, group: dist.ProcessGroup, steps: int, wrong: dict[int, int], **options: Any
) -> tuple[nn.Module, Distributed]:
    """`wrong`: rank -> the step after which a bit of its replica flips."""
    model = copy.deepcopy(MODEL)
    settings = {"lr": 0.01, "verify_every": EVERY, "process_group": group, **options}
    opt = Distributed(model.named_parameters(), **settings)
    for number in range(steps):
        backward(model, 10 * number + rank)
        opt.step()
        if wrong.get(rank) == number:
            flip(model.get_parameter(FLIPPED), element=5 + rank)
    return model, opt


def values(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def momenta(opt: Distributed) -> Tensor:
    return torch.cat([kept["exp_avg"].flatten() for kept in opt.state.values()])


@pytest.mark.parametrize("path", PATHS)
def test_a_flipped_bit_is_found_and_named(path: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        with pytest.raises(AgreementError) as error:
            trained(rank, group, 3 * EVERY, {1: EVERY}, **PATHS[path])
        return str(error.value)

    for text in succeed(world(3, work)):
        assert text.startswith(
            f"replicas are not equal after t={2 * EVERY} steps: on rank 1 {FLIPPED} differs (compared with rank 0): "
        )
        assert "on_mismatch='repair'" in text and "checkpoint" in text


@pytest.mark.wide(4)
@pytest.mark.filterwarnings("ignore:replicas are not equal")
@pytest.mark.parametrize("path", PATHS)
def test_a_flipped_bit_is_mended(path: str) -> None:
    """Bitwise, and what the others learned is as if nothing had happened; the mended worker keeps its momentum."""

    def work(rank: int, group: dist.ProcessGroup, wrong: dict[int, int]) -> Any:
        model, opt = trained(rank, group, 2 * EVERY, wrong, on_mismatch="repair", **PATHS[path])
        return values(model), momenta(opt), opt.stats

    honest = succeed(world(3, lambda rank, group: work(rank, group, {})))
    mended = succeed(world(3, lambda rank, group: work(rank, group, {0: 2 * EVERY - 2})))
    for rank, (found, momentum, stats) in enumerate(mended):
        assert torch.equal(found, mended[0][0])
        assert stats.checks == 2 and stats.repairs == 1
        assert stats.check_bytes_sent > honest[rank][2].check_bytes_sent
        assert stats.bytes_sent == honest[rank][2].bytes_sent
        # with the mean gradient everybody learned from the changed replica
        assert rank == 0 or path.startswith("g-") or torch.equal(momentum, honest[rank][1])
    assert [stats.repairs for _, _, stats in honest] == [0, 0, 0]


def test_the_mended_one_is_warned_about_on_every_rank() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        trained(rank, group, 1, {2: 0}, on_mismatch="repair")[1].verify_replicas()

    for error in world(3, work):
        assert isinstance(error, UserWarning)
        assert f"on rank 2 {FLIPPED} differs (compared with rank 0); they took the values of rank 0" in str(error)


@pytest.mark.filterwarnings("ignore:replicas are not equal")
def test_replicas_are_compared_on_demand_too() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Any:
        fresh = Distributed(copy.deepcopy(MODEL).parameters(), process_group=group)
        model, opt = trained(rank, group, 4, {1: 1, 4: 2}, on_mismatch="repair", verify_every=None)
        before = momenta(opt)
        found = fresh.verify_replicas(), opt.verify_replicas(), opt.verify_replicas(), values(model), opt.stats.checks
        assert torch.equal(momenta(opt), before)
        return found

    results = succeed(world(5, work))
    for fresh, first, second, found, checks in results:
        assert (fresh, first, second, checks) == ([], [1, 4], [], 2)
        assert torch.equal(found, results[0][3])


def test_without_a_strict_majority_nobody_is_mended() -> None:
    def work(rank: int, group: dist.ProcessGroup, size: int) -> None:
        trained(rank, group, EVERY, dict.fromkeys(range(size // 2), 1), on_mismatch="repair")

    for size in (2, 4):
        for error in world(size, lambda rank, group, size=size: work(rank, group, size)):
            assert isinstance(error, AgreementError)
            assert "cannot mend no strict majority of equal workers" in str(error)


def test_never_means_never_and_off_steps_are_not_compared() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> list[int]:
        plans = ((0, 2 * EVERY), (None, 2 * EVERY), (EVERY, EVERY - 1), (EVERY, 2 * EVERY + 2))
        return [trained(rank, group, steps, {}, verify_every=every)[1].stats.checks for every, steps in plans]

    assert succeed(world(2, work)) == [[0, 0, 0, 2]] * 2


def test_a_step_that_nobody_voted_in_is_not_compared_again() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        model, opt = trained(rank, group, EVERY, {})
        for _ in range(2):
            backward(model, rank)
            for param in model.parameters():
                param.grad.fill_(torch.nan)
            opt.step()
        return opt.stats.checks, opt.stats.skipped

    assert succeed(world(2, work)) == [(1, 2)] * 2


def other_state(opt: Distributed, form: bool) -> None:
    """A state that a voting method, or another optimizer, might have saved."""
    saved = copy.deepcopy(opt.state_dict())
    for kept in saved["state"].values():
        kept["exp_avg"] += 1
        if form:
            kept.pop("exp_avg_sq")
    opt.load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:replicas are not equal")
@pytest.mark.parametrize("method", ["g-lion", "g-adamw", "terngrad"])
@pytest.mark.parametrize("policy", ["raise", "repair"])
def test_a_different_state_loaded_between_steps_is_found(method: str, policy: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Any:
        model, opt = trained(rank, group, EVERY - 1, {}, method=method, on_mismatch=policy, lr=0.001)
        if method == "terngrad":
            for kept in opt.state.values():
                kept["momentum_buffer"] += rank == 2
        elif rank == 2:
            other_state(opt, form=False)
        backward(model, rank)
        if policy == "raise":
            with pytest.raises(AgreementError, match=r"on rank 2 0\.weight differs"):
                opt.step()
            return None
        opt.step()
        return values(model), torch.cat([v.flatten() for kept in opt.state.values() for v in kept.values()])

    results = succeed(world(3, work))
    if policy == "repair":
        assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_state_of_another_form_cannot_be_mended() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        _, opt = trained(rank, group, 1, {}, method="g-adamw", on_mismatch="repair")
        if rank == 1:
            other_state(opt, form=True)
        opt.verify_replicas()

    for error in world(3, work):
        assert isinstance(error, AgreementError) and "cannot mend state of another form" in str(error)


def test_who_takes_part_without_counting_is_not_compared() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> list[int]:
        _, opt = trained(rank, group, 2, {1: 1})
        exchange = opt._renewal.between_steps()
        return exchange.checks.verification.compare(exchange.replica, 2, counts=rank != 1)

    assert succeed(world(2, work)) == [[], []]


@pytest.mark.filterwarnings("ignore:replicas are not equal")
def test_views_and_low_precision_are_mended_where_they_are() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> Any:
        base = torch.arange(40.0).reshape(5, 8)
        params = [nn.Parameter(base.t()), nn.Parameter(torch.ones(7, dtype=torch.bfloat16))]
        opt = DistributedLion(params, lr=0.01, process_group=group, on_mismatch="repair")
        opt.verify_replicas()
        if rank == 3:
            base[3, 4] = -1
            params[1].detach()[6] = 2
        return opt.verify_replicas(), base, params[1].detach()

    results = succeed(world(4, work))
    for mended, base, low in results:
        assert mended == [3] and torch.equal(base, results[0][1]) and torch.equal(low, torch.ones(7).bfloat16())


def test_a_comparison_inside_a_step_is_refused_with_overlap() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model, opt = trained(rank, group, 2, {}, overlap=True)
        backward(model, rank)
        with pytest.raises(OverlapError, match="compared after ballots have left"):
            opt.verify_replicas()
        opt.step()
        assert opt.verify_replicas() == []

    succeed(world(2, work))


@pytest.mark.slow
def test_who_does_not_come_to_a_comparison_is_named() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        _, opt = trained(rank, group, EVERY - 1, {})
        if rank == 0:
            return ""
        with pytest.raises(ExchangeError) as error:
            opt.verify_replicas()
        return str(error.value)

    assert "rank 0 did not arrive within" in (said := succeed(world(2, work, seconds=1)))[1]
    assert "in verification at t=1" in said[1]


def test_one_worker_and_a_simulation_have_nothing_to_compare() -> None:
    alone = DistributedLion(copy.deepcopy(MODEL).parameters(), verify_every=1)
    backward(MODEL, 0)
    alone.step()
    assert alone.verify_replicas() == [] and alone.stats.checks == 0
    assert Simulation(copy.deepcopy(MODEL), workers=3).verify_replicas() == []
    for name, value in (("verify_every", 10), ("on_mismatch", "repair")):
        with pytest.raises(ValueError, match=f"{name} has no meaning where all workers compute in one process"):
            Simulation(copy.deepcopy(MODEL), workers=3, **{name: value})
