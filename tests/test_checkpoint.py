"""Checkpoints: resumed equals never stopped, to the bit, for every method and path; other numbers of workers go on."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import equal, fresh, simulate, train, trained, whole
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from world import succeed, world

from dlion import Distributed, Simulation, checkpoint, synchronize_buffers
from dlion.checkpoint.draft import Draft
from dlion.checkpoint.newcomers import mean_of_workers
from dlion.methods import METHODS

PATHS: dict[str, dict[str, Any]] = {
    "generic": {"kernels": "reference"},
    "fused": {"kernels": "auto"},
    "overlap": {"overlap": True, "bucket_bytes": 8},
    "bf16": {"momentum_dtype": torch.bfloat16},
    "average": {"method": "dlion-avg", "zeros": "exact"},
}


def run_of(folder: Path, workers: int, **options: Any) -> list[tuple[bool, bool]]:
    """Of each worker: whether a resumed run equals one that went on, and whether one without its state does."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[bool, bool]:
        model = fresh()
        optimizer = Distributed(model.named_parameters(), lr=0.01, weight_decay=0.1, process_group=group, **options)
        train(model, optimizer, rank, range(4))
        saving = checkpoint.save(folder / "a", model, optimizer, extra={"rank": rank}, asynchronous=True)
        train(model, optimizer, rank, range(4, 9))
        saving.wait()

        resumed = fresh()
        again = Distributed(resumed.named_parameters(), lr=7.0, process_group=group, **options)
        assert checkpoint.load(folder / "a", resumed, again) == {"rank": rank}
        train(resumed, again, rank, range(4, 9))

        cold = fresh()
        other = Distributed(cold.named_parameters(), lr=0.01, weight_decay=0.1, process_group=group, **options)
        checkpoint.load(folder / "a", cold, other)
        for state in other.state.values():
            for value in state.values():
                value.zero_()
        train(cold, other, rank, range(4, 9))
        return equal(whole(model, optimizer), whole(resumed, again)), equal(whole(model, optimizer), whole(cold, other))

    return succeed(world(workers, work))


@pytest.mark.wide(2)
@pytest.mark.parametrize("path", PATHS)
def test_four_resumed_workers_never_stopped(path: str, tmp_path: Path) -> None:
    """And it is the state that does it: with momenta of zero they arrive elsewhere."""
    assert run_of(tmp_path, 4, **PATHS[path]) == [(True, False)] * 4


@pytest.mark.wide(4)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_to_the_bit(method: str, tmp_path: Path) -> None:
    stateless = method == "signsgd-mavo"
    assert run_of(tmp_path, 2, method=method) == [(True, stateless)] * 2


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A checkpoint of four workers after 20 steps, and each one's state, buffers and loss."""
    path = tmp_path_factory.mktemp("four") / "step-20"

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        model = fresh()
        optimizer = Distributed(model.parameters(), lr=0.001, process_group=group)
        losses = train(model, optimizer, rank, range(20))
        checkpoint.save(path, model, optimizer, extra=rank, notes={"seed": 1})
        return whole(model, optimizer)["tensors"], losses

    return path, succeed(world(4, work))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_another_number_of_workers_starts_from_the_mean(workers: int, four: tuple[Path, list[Any]]) -> None:
    path, saved = four
    tensors = [each for each, _ in saved]
    means = mean_of_workers(iter(tensors))

    def work(rank: int, group: dist.ProcessGroup | None) -> list[float]:
        model = fresh()
        optimizer = Distributed(model.parameters(), process_group=group)
        assert checkpoint.load(path, model, optimizer) == 0
        assert optimizer.param_groups[0]["t"] == 20 and optimizer.stats.steps == 20
        for name, value in whole(model, optimizer)["tensors"].items():
            assert torch.equal(value, means[name])
        return train(model, optimizer, rank, range(20, 40))

    losses = [work(0, None)] if workers == 1 else succeed(world(workers, work))
    before = [losses[-1] for _, losses in saved]
    first = [losses[0] for _, losses in saved]
    # the loss goes on where it was: a start from nothing is at `first`
    now = sum(each[0] for each in losses) / workers
    assert now < sum(before) / 4 + 0.1 * (sum(first) / 4 - sum(before) / 4)
    assert sum(each[-1] for each in losses) / workers < now


def test_the_mean_is_taken_in_rank_order_and_whole_numbers_are_the_first_workers() -> None:
    rows = [
        {"m": torch.tensor([x], dtype=torch.bfloat16), "n": torch.tensor(k)} for k, x in enumerate((256.0, 1, 1, 2))
    ]
    mean = mean_of_workers(iter(rows))
    assert mean["m"].dtype == torch.bfloat16 and float(mean["m"]) == 65.0  # in bfloat16 the sum would stay 256
    assert int(mean["n"]) == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128])
def test_buffers_of_every_kind_are_loaded_at_another_number(dtype: torch.dtype, tmp_path: Path) -> None:
    """As `synchronize_buffers` gives them."""
    values = [torch.tensor([2.0, -6.0]).to(dtype), torch.tensor([4.0, -2.0]).to(dtype)]

    def work(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model, optimizer = trained(1, group, rank)
        model.register_buffer("odd", values[rank])
        checkpoint.save(tmp_path / "a", model, optimizer)
        return synchronize_buffers(model, group).odd

    both = succeed(world(2, work))
    model, optimizer = trained(1)
    model.register_buffer("odd", torch.zeros(2).to(dtype))
    checkpoint.load(tmp_path / "a", model, optimizer)
    simulation = Simulation(model, workers=2)
    for rank in range(2):
        simulation.load_buffers({**simulation.buffers(rank), "odd": values[rank]}, rank)
    simulation.synchronize_buffers()
    for found in (*both, model.odd, *(simulation.buffers(rank)["odd"] for rank in range(2))):
        assert found.dtype == dtype and found.to(torch.complex128).tolist() == [3, -4]


def test_torch_reads_all_momenta_stacked(four: tuple[Path, list[Any]]) -> None:
    path, saved = four
    stacked = {"own/exp_avg/0.weight": torch.zeros(4, 70, 5), "parameter/2.bias": torch.zeros(3)}
    reader = FileSystemReader(path)
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(stacked, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    for rank, (tensors, _) in enumerate(saved):
        assert torch.equal(stacked["own/exp_avg/0.weight"][rank], tensors["exp_avg/0"])
    assert torch.equal(stacked["parameter/2.bias"], saved[0][0]["2.bias"])


def test_notes_are_read_without_unpickling(four: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pickle.load", None)
    manifest = checkpoint.verify(four[0])
    assert (manifest.notes, manifest.workers, manifest.t, manifest.method) == ({"seed": 1}, 4, 20, "dlion-mavo")


# ---- simulated workers


def simulation_of(workers: int, **options: Any) -> Simulation:
    return Simulation(fresh(), workers=workers, lr=0.01, **options)


@pytest.mark.parametrize("method", ["dlion-mavo", "g-adamw", "dgc"])
def test_simulated_workers_go_on_as_real_ones_and_real_ones_as_simulated(method: str, tmp_path: Path) -> None:
    simulation = simulation_of(3, method=method)
    simulate(simulation, range(4))
    checkpoint.save(tmp_path / "simulated", simulation.model, simulation, extra="x")

    def real(rank: int, group: dist.ProcessGroup) -> Any:
        model = fresh()
        optimizer = Distributed(model.parameters(), method, process_group=group)
        assert checkpoint.load(tmp_path / "simulated", model, optimizer) == "x"
        train(model, optimizer, rank, range(4, 6))
        checkpoint.save(tmp_path / "real", model, optimizer)
        return whole(model, optimizer)

    ended = succeed(world(3, real))
    simulate(simulation, range(4, 6))
    again = simulation_of(3, method=method)
    checkpoint.load(tmp_path / "real", again.model, again)
    for rank, state in enumerate(ended):
        for one in (simulation, again):
            with one.seen_by(rank):
                here = whole(one.model, one)["tensors"] | one.buffers(rank)
            assert all(torch.equal(value, here[name]) for name, value in state["tensors"].items())
    simulate(simulation, range(6, 8)), simulate(again, range(6, 8))
    assert all(map(torch.equal, simulation.model.parameters(), again.model.parameters()))


def test_the_files_of_a_simulation_are_those_of_real_workers(tmp_path: Path) -> None:
    simulation = simulation_of(2)
    simulate(simulation, range(3))
    checkpoint.save(tmp_path / "simulated", simulation.model, simulation)

    def real(rank: int, group: dist.ProcessGroup) -> None:
        model = fresh()
        optimizer = Distributed(model.named_parameters(), lr=0.01, process_group=group)
        train(model, optimizer, rank, range(3))
        optimizer.stats.check_bytes_sent = optimizer.stats.check_bytes_received = 0  # a simulation has no start-up
        checkpoint.save(tmp_path / "real", model, optimizer)

    succeed(world(2, real))
    names = sorted(path.name for path in (tmp_path / "real").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "simulated").iterdir())
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        assert (tmp_path / "real" / name).read_bytes() == (tmp_path / "simulated" / name).read_bytes()


# ---- odd parameters


def test_a_parameter_that_was_frozen_keeps_each_workers_momentum(tmp_path: Path) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> bool:
        ends = []
        for saved in (False, True):
            model = fresh()
            optimizer = Distributed(model.parameters(), lr=0.01, process_group=group)
            train(model, optimizer, rank, range(3))
            model[0].requires_grad_(False)
            train(model, optimizer, rank, range(3, 5))
            if saved:
                kept = optimizer.state[model[0].weight]["exp_avg"].clone()
                checkpoint.save(tmp_path / "a", model, optimizer)
                model = fresh()
                model[0].requires_grad_(False)
                optimizer = Distributed(model.parameters(), process_group=group)
                checkpoint.load(tmp_path / "a", model, optimizer)
                assert torch.equal(kept, optimizer.state[model[0].weight]["exp_avg"]) and kept.any()
            model[0].requires_grad_(True)
            train(model, optimizer, rank, range(5, 7))
            ends.append(whole(model, optimizer)["tensors"])
        return all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())

    assert succeed(world(2, work)) == [True, True]


def test_empty_scalar_tied_and_transposed_parameters_are_kept(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(2.0))
            self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).T)
            self.tied = self.turned
            self.wide = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))

    def grown(value: float) -> tuple[nn.Module, Distributed]:
        model = Odd()
        optimizer = Distributed(model.parameters(), lr=torch.tensor(0.5))
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.full_like(param, value)
            optimizer.step()
        return model, optimizer

    model, optimizer = grown(1.0)
    checkpoint.save(tmp_path / "odd", model, optimizer)
    other, again = grown(-2.0)
    assert not equal(whole(model, optimizer), whole(other, again))
    checkpoint.load(tmp_path / "odd", other, again)
    assert equal(whole(model, optimizer), whole(other, again)) and not other.turned.is_contiguous()


def test_training_goes_on_from_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the state of the moment of saving, although training has moved it before the first byte."""
    gate = threading.Event()
    write = Draft.write
    monkeypatch.setattr(Draft, "write", lambda *args: gate.wait(30) and write(*args))
    model = fresh()
    optimizer = Distributed(model.parameters(), lr=0.01)
    train(model, optimizer, 0, range(3))
    before = whole(model, optimizer)
    saving = checkpoint.save(tmp_path / "a", model, optimizer, asynchronous=True)
    train(model, optimizer, 0, range(3, 6))
    assert not saving.done and not (tmp_path / "a").exists() and not equal(before, whole(model, optimizer))
    gate.set()
    saving.wait()
    assert saving.done and saving.held_up < 30
    checkpoint.load(tmp_path / "a", model, optimizer)
    assert equal(before, whole(model, optimizer))
