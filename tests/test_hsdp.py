"""FSDP2 over the inner mesh dimension, votes over the outer one: four processes, two replicas of two shards each."""

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hsdp_runs import REPLICAS, SHARDS, a_model, backward, mesh_of, refusal, sharded
from processes import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dlion import Distributed, Simulation, local_gradients
from dlion.methods import METHODS

pytestmark = pytest.mark.processes

STEPS = 6
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "bucket_bytes": 16}


def shards(model: nn.Module) -> list[Tensor]:
    return [param.to_local().detach().clone() for param in model.parameters()]


def gradient_shards(model: nn.Module) -> list[Tensor]:
    return [param.grad.to_local().clone() for param in model.parameters()]


def said(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def orphaned(rank: int, size: int, folder: Path) -> list[str]:
    """The optimizer is made before the model is sharded, which gives it other parameters."""
    mesh = mesh_of(folder, rank, size)
    group = mesh["replicate"].get_group()
    model = local_gradients(a_model(seed=0), group)
    optimizer = Distributed(model.named_parameters(), process_group=group, **OPTIONS)
    fully_shard(model, mesh=mesh["shard"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            backward(model, rank, step)
            optimizer.step()
    return [str(each.message) for each in caught if each.filename == __file__]


def test_an_optimizer_that_was_made_before_its_model_was_sharded_warns(tmp_path: Path) -> None:
    for said in launch(tmp_path, REPLICAS * SHARDS, orphaned):
        assert len(said) == 1 and "no parameter of the optimizer had a gradient on any worker" in said[0]
        assert "call fully_shard(model)" in said[0]


def trains(rank: int, size: int, folder: Path, **options: Any) -> dict[str, Any]:
    """Six steps. Every rank's own gradients go into a file, for the simulator."""
    mesh = mesh_of(folder, rank, size)
    group = mesh["replicate"].get_group()
    model = local_gradients(sharded(mesh["shard"], seed=rank // SHARDS), group)
    optimizer = Distributed(model.named_parameters(), process_group=group, **{**OPTIONS, **options})
    begun, gradients = shards(model), []
    for step in range(STEPS):
        backward(model, rank, step)
        gradients.append(gradient_shards(model))
        optimizer.step()
    torch.save({"begun": begun, "gradients": gradients, "ended": shards(model)}, folder / f"{rank}.pt")
    return {
        "begun": said(begun),
        "ended": said(shards(model)),
        "gradients": said([tensor for step in gradients for tensor in step]),
        "momentum": said([optimizer.state[param]["exp_avg"].to_local() for param in model.parameters()]),
        "bits": optimizer.stats.bits_per_param_sent,
        "exchanged": optimizer.stats.parameters_exchanged,
    }


@pytest.fixture(scope="module", params=["waits", "overlaps"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, launch(folder, REPLICAS * SHARDS, {"waits": trains, "overlaps": trains_overlapping}[request.param])


def trains_overlapping(rank: int, size: int, folder: Path) -> dict[str, Any]:
    return trains(rank, size, folder, overlap=True)


def test_replicas_start_and_end_equal_and_shards_differ(trained: tuple[Path, list[Any]]) -> None:
    _, ranks = trained
    for key in ("begun", "ended"):
        assert ranks[0][key] == ranks[2][key] and ranks[1][key] == ranks[3][key] and ranks[0][key] != ranks[1][key]
    for key in ("gradients", "momentum"):
        assert len({rank[key] for rank in ranks}) == 4


def test_it_votes_as_two_simulated_workers_do(trained: tuple[Path, list[Any]]) -> None:
    """Of each shard: two workers that have its parameters and gradients, which are means over the two inner ranks."""
    folder, _ = trained
    for shard in range(SHARDS):
        replicas = [torch.load(folder / f"{SHARDS * replica + shard}.pt") for replica in range(REPLICAS)]
        params = nn.ParameterList([nn.Parameter(tensor.clone()) for tensor in replicas[0]["begun"]])
        simulation = Simulation(params, workers=REPLICAS, **OPTIONS)
        for step in range(STEPS):
            for rank in range(REPLICAS):
                with simulation.worker(rank):
                    for param, gradient in zip(params, replicas[rank]["gradients"][step], strict=True):
                        param.grad = gradient
            simulation.step()
        for param, ended, begun in zip(params, replicas[0]["ended"], replicas[0]["begun"], strict=True):
            assert torch.equal(param, ended) and (not ended.numel() or not torch.equal(ended, begun))


def by_every_method(rank: int, size: int, folder: Path) -> None:
    mesh = mesh_of(folder, rank, size)
    group = mesh["replicate"].get_group()
    told = {}
    for method in METHODS:
        model = local_gradients(sharded(mesh["shard"], seed=0), group)
        optimizer = Distributed(model.named_parameters(), method=method, process_group=group, lr=0.01)
        begun, gradients = shards(model), []
        for step in range(3):
            backward(model, rank, step)
            gradients.append(gradient_shards(model))
            optimizer.step()
        told[method] = {"begun": begun, "gradients": gradients, "ended": shards(model)}
    torch.save(told, folder / f"{rank}.pt")


@pytest.mark.timeout(240)  # twelve methods in four processes
def test_every_method_trains_shards_as_two_simulated_workers_do(tmp_path: Path) -> None:
    """A method whose state or step was made for whole parameters would leave shards where they are, or mix the two."""
    launch(tmp_path, REPLICAS * SHARDS, by_every_method, seconds=200)
    for shard in range(SHARDS):
        replicas = [torch.load(tmp_path / f"{SHARDS * replica + shard}.pt") for replica in range(REPLICAS)]
        for method in METHODS:
            of_each = [replica[method] for replica in replicas]
            params = nn.ParameterList([nn.Parameter(tensor.clone()) for tensor in of_each[0]["begun"]])
            simulation = Simulation(params, method=method, workers=REPLICAS, lr=0.01)
            for step in range(3):
                for rank in range(REPLICAS):
                    with simulation.worker(rank):
                        for param, gradient in zip(params, of_each[rank]["gradients"][step], strict=True):
                            param.grad = gradient
                simulation.step()
            for replica in of_each:
                assert all(map(torch.equal, params, replica["ended"])), method
            # of few entries that are sent, none need be a tensor's
            assert not all(map(torch.equal, params, of_each[0]["begun"])), method


def test_a_rank_sends_a_bit_for_each_element_of_its_shards(trained: tuple[Path, list[Any]]) -> None:
    folder, ranks = trained
    for rank, told in enumerate(ranks):
        elements = sum(tensor.numel() for tensor in torch.load(folder / f"{rank}.pt")["begun"])
        assert told["exchanged"] == STEPS * elements
    whole = sum(param.numel() for param in a_model(0).parameters())
    assert sum(told["exchanged"] for told in ranks) == REPLICAS * STEPS * whole


def is_refused(rank: int, size: int, folder: Path) -> list[str]:
    """What is said of every wrong set-up."""
    mesh = mesh_of(folder, rank, size)
    inner, group = mesh["shard"], mesh["replicate"].get_group()
    attempts = [
        lambda: local_gradients(sharded(inner, 0)),  # the default group
        lambda: local_gradients(sharded(mesh, 0), group),  # torch's own HSDP
        lambda: local_gradients(sharded(inner, 0), inner.get_group()),
        lambda: local_gradients(partly_sharded(inner), group),
        lambda: first_step(Distributed(sharded(inner, 0).named_parameters())),
        lambda: first_step(Distributed(sharded(mesh, 0).named_parameters(), process_group=group)),
    ]
    return [refusal(attempt) for attempt in attempts]


def partly_sharded(mesh: DeviceMesh) -> nn.Module:
    model = a_model(0)
    fully_shard(model[0], mesh=mesh)
    return model


def first_step(optimizer: Distributed) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()


def test_what_cannot_work_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for rank, told in enumerate(launch(tmp_path, REPLICAS * SHARDS, is_refused)):
        inner = [[0, 1], [2, 3]][rank // 2]
        among = f"0.weight is sharded over ranks {inner[0]}, {inner[1]}, and ranks {inner[0]}, {inner[1]} of them vote"
        assert told[0].startswith(among) and told[2].startswith(among) and told[4].startswith(among)
        assert 'fully_shard(module, mesh=mesh["shard"])' in told[0]
        both = "0.weight is sharded over ranks 0, 1, 2, 3, and ranks"
        assert told[1].startswith(both) and told[5].startswith(both)
        assert told[3].startswith("2.weight is whole on every rank while 0.weight is sharded")


def starts_with_frozen_parts(rank: int, size: int, folder: Path) -> str:
    mesh = mesh_of(folder, rank, size)
    model = a_model(seed=rank)
    model[0].requires_grad_(False)
    for layer in (model[2], model[4]):
        fully_shard(layer, mesh=mesh["shard"])
    local_gradients(model, mesh["replicate"].get_group())
    return said([param.detach() for param in model[0].parameters()])


def test_what_is_whole_and_frozen_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    assert len(set(launch(tmp_path, REPLICAS * SHARDS, starts_with_frozen_parts))) == 1


def averages_by_hand(rank: int, size: int, folder: Path) -> list[str]:
    """Warnings of a run whose gradients somebody averages across replicas before the vote."""
    mesh = mesh_of(folder, rank, size)
    group = mesh["replicate"].get_group()
    model = local_gradients(sharded(mesh["shard"], 0), group)
    optimizer = Distributed(model.named_parameters(), process_group=group, **OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            backward(model, rank, step)
            for param in model.parameters():
                dist.all_reduce(param.grad.to_local(), group=group)
            optimizer.step()
    return [str(warning.message) for warning in caught if "averaged" in str(warning.message)]


def test_averaging_left_on_is_noticed(tmp_path: Path) -> None:
    for told in launch(tmp_path, REPLICAS * SHARDS, averages_by_hand):
        assert len(told) == 1
