"""Workers with unequal amounts of data in torch's `Join`: who has finished looks on, and in the end all are equal."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join
from torch.optim import lr_scheduler
from uneven import LR, UNEVEN, Net, ranks_of_threads
from world import succeed, world

from dlion import Distributed
from dlion.elastic import Elastic
from dlion.joining import shared_state
from dlion.methods import METHODS
from dlion.replica import Replica
from dlion.simulate import Fault, Simulation

DECAY = 0.1


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_of_threads(monkeypatch)


def equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


def momenta(optimizer: Distributed) -> list[Tensor]:
    own = ("exp_avg", "residual", "velocity")
    return [kept[name].clone() for kept in optimizer.state.values() for name in own if name in kept]


def joined(rank: int, group: Any, steps: tuple[int, ...] = UNEVEN, **options: Any) -> dict[str, Any]:
    """Train inside `Join` with a falling learning rate, then one more step with everybody."""
    net = Net()
    optimizer = Distributed(net.named_parameters(), lr=LR, weight_decay=DECAY, process_group=group, **options)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))
    with Join([optimizer], schedulers=[scheduler]):
        for step in range(steps[rank]):
            net.backward(rank, step)
            optimizer.step()
            scheduler.step()
        own = momenta(optimizer)
    ends = {
        "params": net.tensors(),
        "own": own,
        "kept": momenta(optimizer),
        "shared": [value.clone() for _, _, value in shared_state(optimizer, _replica(optimizer))],
        "said": (optimizer.param_groups[0]["t"], optimizer.param_groups[0]["lr"], scheduler.last_epoch),
        "stats": copy.copy(optimizer.stats),
    }
    net.backward(rank, max(steps))
    optimizer.step()
    return ends | {"after": net.tensors()}


def _replica(optimizer: Distributed) -> Replica:
    return Replica(optimizer.param_groups, optimizer.state)


def simulated(steps: tuple[int, ...] = UNEVEN, **options: Any) -> tuple[list[Tensor], list[Tensor], Simulation]:
    """The same, where a worker that has finished is one that is absent."""
    net, workers = Net(), len(steps)
    faults = [Fault("absent", [rank], range(end, max(steps))) for rank, end in enumerate(steps)]
    for name in ("overlap", "verify_every", "on_mismatch"):
        options.pop(name, None)
    simulation = Simulation(net, lr=LR, weight_decay=DECAY, workers=workers, faults=faults, **options)
    scheduler = lr_scheduler.LambdaLR(simulation, lambda epoch: 1 / (epoch + 1))
    seen = []
    for step in range(max(steps) + 1):
        for rank in range(workers):
            with simulation.worker(rank):
                net.backward(rank, step)
        simulation.step()
        scheduler.step()
        seen.append(net.tensors())
    return seen[-2], seen[-1], simulation


OPTIONS: list[dict[str, Any]] = [
    *({"method": method, "topology": topology} for method in METHODS for topology in METHODS[method].topologies),
    {"bucket_bytes": 16, "zeros": "exact"},
    {"bucket_bytes": 16, "method": "dlion-avg", "zeros": "exact"},
    {"bucket_bytes": 16, "overlap": True, "verify_every": 1},
    {"bucket_bytes": 16, "nonfinite": "skip", "verify_every": 2, "on_mismatch": "repair"},
    {"bucket_bytes": 16, "nonfinite": "raise", "kernels": "reference"},
]


@pytest.mark.wide(9)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_who_has_finished_is_absent_and_in_the_end_like_the_others(options: dict[str, Any]) -> None:
    found = succeed(world(len(UNEVEN), lambda rank, group: joined(rank, group, **options)))
    wanted, after, simulation = simulated(**options)
    for rank, ends in enumerate(found):
        assert equal(ends["params"], wanted) and equal(ends["after"], after), rank
        assert ends["said"] == (max(UNEVEN), LR / (max(UNEVEN) + 1), max(UNEVEN))
        assert equal(ends["shared"], found[1]["shared"])
        assert ends["stats"].abstentions == simulation.stats_of(rank).abstentions
        assert ends["stats"].steps == max(UNEVEN) and ends["stats"].skipped == 0
        if rank == 0 and "dlion" in options.get("method", "dlion"):
            assert equal(ends["own"], ends["kept"])  # its momentum rested


def test_workers_that_finish_together_exchange_nothing_more() -> None:
    for ends in succeed(world(3, lambda rank, group: joined(rank, group, (3, 3, 3)))):
        assert equal(ends["params"], simulated((3, 3, 3))[0]) and ends["stats"].abstentions == 0


def test_several_optimizers_in_one_join() -> None:
    def work(rank: int, group: Any) -> Any:
        one, two = Net(1), Net(2)
        first = Distributed(one.parameters(), lr=LR, process_group=group)
        second = Distributed(two.parameters(), "dlion-avg", lr=LR, process_group=group)
        with Join([first, second]):
            for step in range(UNEVEN[rank]):
                for net, optimizer in ((one, first), (two, second)):
                    net.backward(rank, step)
                    optimizer.step()
        return one.tensors(), two.tensors(), first.param_groups[0]["t"], second.param_groups[0]["t"]

    found = succeed(world(len(UNEVEN), work))
    for one, two, *steps in found:
        assert equal(one, found[0][0]) and equal(two, found[0][1]) and steps == [6, 6]
        assert not equal(one, two)


def test_a_first_step_that_only_allocates_is_followed() -> None:
    """Warm-up from 0: a fresh optimizer whose learning rate is 0 exchanges nothing in its first step."""

    def work(rank: int, group: Any) -> Any:
        net = Net()
        optimizer = Distributed(net.parameters(), lr=LR, process_group=group)
        warm = lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, epoch / 3))
        with Join([optimizer], schedulers=[warm]):
            for step in range(UNEVEN[rank]):
                net.backward(rank, step)
                optimizer.step()
                warm.step()
        return net.tensors(), optimizer.param_groups[0]["t"], optimizer.param_groups[0]["lr"]

    found = succeed(world(len(UNEVEN), work))
    assert all(equal(params, found[0][0]) and (t, lr) == (5, LR) for params, t, lr in found)


def test_gradient_scalers_and_uneven_data_together() -> None:
    def work(rank: int, group: Any) -> Any:
        net, scaler = Net(), GradScaler("cpu", init_scale=2.0 ** (4 + rank))
        optimizer = Distributed(net.parameters(), lr=LR, process_group=group)
        with Join([optimizer]):
            for step in range(UNEVEN[rank]):
                noise = torch.Generator().manual_seed(100 * step + rank)
                optimizer.zero_grad()
                scaled = scaler.scale(sum((p * torch.randn(p.shape, generator=noise)).sum() for p in net.values))
                (scaled * torch.inf if (rank, step) == (1, 3) else scaled).backward()
                scaler.step(optimizer)
                scaler.update()
        return net.tensors(), optimizer.stats.abstentions

    found = succeed(world(len(UNEVEN), work))
    assert all(equal(params, found[0][0]) and abstained == 4 + 6 + 1 for params, abstained in found)


def test_early_termination_ends_everybody_before_the_step_and_training_can_go_on() -> None:
    def work(rank: int, group: Any) -> Any:
        net = Net()
        optimizer = Distributed(net.parameters(), lr=LR, process_group=group)
        with pytest.raises(RuntimeError, match="exhausted"):
            with Join([optimizer], throw_on_early_termination=True):
                for step in range((2, 6, 3)[rank]):
                    net.backward(rank, step)
                    optimizer.step()
        t = optimizer.param_groups[0]["t"]
        for step in range(2):
            net.backward(rank, step)
            optimizer._join_config = type(optimizer._join_config).construct_disabled_join_config()
            optimizer.step()
        return net.tensors(), t, optimizer.stats.abstentions

    found = succeed(world(3, work))
    assert all(equal(params, found[0][0]) and (t, abstained) == (2, 0) for params, t, abstained in found)


def test_early_termination_and_overlap_are_refused_together() -> None:
    def work(rank: int, group: Any) -> None:
        net = Net()
        optimizer = Distributed(net.parameters(), lr=LR, process_group=group, overlap=True)
        with pytest.raises(ValueError, match="use overlap=False, or leave throw_on_early_termination out"):
            with Join([optimizer], throw_on_early_termination=True):
                net.backward(rank, 0)
                optimizer.step()

    succeed(world(2, work))


def test_join_is_refused_where_workers_are_no_processes_of_one_group() -> None:
    net = Net()
    elastic = Elastic(net.named_parameters(), lr=LR, lighthouse="127.0.0.1:1", worker=0, workers=2)
    simulation = Simulation(net, workers=2, lr=LR)
    for optimizer, instead in ((elastic, "calls close()"), (simulation, 'Fault("absent", ...)')):
        with pytest.raises(ValueError, match="torch's Join is for ") as caught:
            Join([optimizer])
        assert type(optimizer).__name__ in str(caught.value) and instead in str(caught.value)
