"""Checkpoints of models sharded by FSDP2: every replica's momenta in shards, parameters once, at any mesh again."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hsdp_runs import REPLICAS, SHARDS, backward, mesh_of
from processes import launch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dlion import Distributed, checkpoint, local_gradients
from dlion.checkpoint.newcomers import mean_of_workers
from dlion.checkpoint.stacked import Stacked
from dlion.layout import local

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]  # four to six processes on two cores
SAVED, STEPS = 3, 6
WAYS: dict[str, dict[str, Any]] = {
    "majority": {"verify_every": 2},
    "overlap": {"method": "dlion-avg", "overlap": True, "bucket_bytes": 8, "momentum_dtype": torch.bfloat16},
    "shared state": {"method": "g-lion"},
}


def a_model(seed: int) -> nn.Module:
    """With buffers, each rank's own. Of 11, 5 and 1 rows the first of two ranks holds 6, 3 and 1."""
    torch.manual_seed(seed)
    layers = (nn.Linear(37, 11), nn.BatchNorm1d(11), nn.Tanh(), nn.Linear(11, 5), nn.Linear(5, 1, bias=False))
    return nn.Sequential(*layers)


class Run:
    """A replica's shard: `mesh` has the dimensions "replicate" and "shard"; None: one whole model, alone."""

    def __init__(self, mesh: DeviceMesh | None, seed: int, in_shards: bool = True, **options: Any) -> None:
        self.model, group = a_model(seed), None
        if mesh is not None:
            if in_shards:
                for layer in self.model:
                    fully_shard(layer, mesh=mesh["shard"])
                fully_shard(self.model, mesh=mesh["shard"])
            group = mesh["replicate"].get_group()
            local_gradients(self.model, group)
        given = {"lr": 0.01, "weight_decay": 0.1} | options
        self.optimizer = Distributed(self.model.named_parameters(), process_group=group, **given)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def train(self, rank: int, steps: range) -> None:
        for step in steps:
            backward(self.model, rank, step)
            self.optimizer.step()
            self.schedule.step()

    def state(self) -> dict[str, Tensor]:
        """Copies of what lies here: parameters, buffers and the optimizer's state, by their keys in a checkpoint."""
        params = dict(self.model.named_parameters())
        found = {f"parameter/{name}": param for name, param in params.items()}
        found |= {f"buffer/{name}": buffer for name, buffer in self.model.named_buffers()}
        for name, param in params.items():
            found |= {f"{what}/{name}": value for what, value in self.optimizer.state[param].items()}
        return {key: local(tensor).detach().clone() for key, tensor in found.items()}

    def facts(self) -> list[Any]:
        group, stats = self.optimizer.param_groups[0], self.optimizer.stats
        return [group["t"], group["lr"], group["weight_decay"], stats.steps, stats.bytes_sent]


def equal(mine: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    same = mine.keys() == other.keys()
    return same and all(a.dtype == other[key].dtype and torch.equal(a, other[key]) for key, a in mine.items())


def saves(rank: int, size: int, folder: Path) -> dict[str, list[bool]]:
    """For each way: whether a resumed run is the one that went on, and whether one without its momenta is."""
    mesh, found = mesh_of(folder, rank, size), {}
    for way, options in WAYS.items():
        run = Run(mesh, rank // SHARDS, **options)
        run.train(rank, range(SAVED))
        with torch.no_grad():
            run.model.eval()(torch.ones(2, 37))  # leaves parameters whole
        extra = {"rank": rank, "schedule": run.schedule.state_dict()}
        saving = checkpoint.save(folder / way, run.model.train(), run.optimizer, extra=extra, asynchronous=True)
        torch.save(run.state(), folder / f"{way}-{rank}.pt")
        run.train(rank, range(SAVED, STEPS))
        saving.wait()
        ended = []
        for cold in (False, True)[: 2 if way == "majority" else 1]:
            other = Run(mesh, 7, **options | {"lr": 5.0})
            with torch.no_grad():
                other.model.eval()(torch.ones(2, 37))
            told = checkpoint.load(folder / way, other.model.train(), other.optimizer)
            other.schedule.load_state_dict(told["schedule"])
            assert told["rank"] == rank
            for state in other.optimizer.state.values() if cold else ():
                local(state["exp_avg"]).zero_()
            other.train(rank, range(SAVED, STEPS))
            ended.append(equal(run.state(), other.state()) and run.facts() == other.facts())
        found[way] = ended
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[bool]]]]:
    folder = tmp_path_factory.mktemp("shards")
    return folder, launch(folder, REPLICAS * SHARDS, saves, seconds=200)


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_mesh_never_stopped(way: str, saved: tuple[Path, list[dict[str, list[bool]]]]) -> None:
    """To the bit; and it is the momenta that do it."""
    assert [told[way] for told in saved[1]] == [[True, False] if way == "majority" else [True]] * 4


def parts(folder: Path, way: str = "majority") -> list[dict[str, Tensor]]:
    """What each rank had when it saved."""
    return [torch.load(folder / f"{way}-{rank}.pt") for rank in range(REPLICAS * SHARDS)]


def joined(folder: Path, replica: int) -> dict[str, Tensor]:
    """Parameters and momenta of a replica, put together from its shards."""
    ranks = parts(folder)[replica * SHARDS : (replica + 1) * SHARDS]
    keys = [key for key in ranks[0] if not key.startswith("buffer/")]
    return {key: torch.cat([rank[key] for rank in ranks]) for key in keys}


def test_each_shard_is_written_once_and_stacked_as_torch_reads_it(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    stacked = {
        "own/exp_avg/0.weight": torch.zeros(2, 11, 37),
        "own/exp_avg/4.weight": torch.zeros(2, 1, 5),
        "parameter/0.weight": torch.zeros(11, 37),
        "buffer/1.running_mean": torch.zeros(4, 11),
    }
    with pytest.warns(UserWarning, match="single process"):
        reader = FileSystemReader(folder / "majority")
        dcp_load(stacked, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    for replica in range(REPLICAS):
        whole = joined(folder, replica)
        for name in ("0.weight", "4.weight"):
            assert torch.equal(stacked[f"own/exp_avg/{name}"][replica], whole[f"exp_avg/{name}"])
        assert torch.equal(stacked["parameter/0.weight"], whole["parameter/0.weight"])
    for rank, part in enumerate(parts(folder)):
        assert torch.equal(stacked["buffer/1.running_mean"][rank], part["buffer/1.running_mean"])
    index = FileSystemReader(folder / "majority").read_metadata().state_dict_metadata
    chunks = {key: [tuple(chunk.offsets) for chunk in index[key].chunks] for key in stacked}
    assert chunks["own/exp_avg/0.weight"] == [(0, 0, 0), (0, 6, 0), (1, 0, 0), (1, 6, 0)]
    assert chunks["own/exp_avg/4.weight"] == [(0, 0, 0), (1, 0, 0)]  # of two empty shards nothing
    assert chunks["parameter/0.weight"] == [(0, 0), (6, 0)]
    assert checkpoint.verify(folder / "majority").workers == REPLICAS


def goes_on(rank: int, size: int, folder: Path, shards: int, source: Path, in_shards: bool = True) -> list[Any]:
    """Load into another mesh, write down what is here, and train."""
    mesh = mesh_of(folder, rank, size, shards)
    run = Run(mesh, 3, in_shards)
    told = checkpoint.load(source, run.model, run.optimizer)
    torch.save(run.state(), folder / f"{rank}.pt")
    facts = run.facts()[:4]
    run.train(rank, range(SAVED, STEPS))
    checkpoint.save(folder / "next", run.model, run.optimizer, extra={"rank": rank})
    return [told["rank"], *facts]


MESHES = {"1x2": (1, 2), "3x2": (3, 2), "2x1": (2, 1), "1x4": (1, 4)}


@pytest.mark.parametrize("mesh", [*MESHES, "unsharded"])
def test_any_other_mesh_goes_on(mesh: str, saved: tuple[Path, Any], tmp_path: Path) -> None:
    """As many replicas each from its own momentum, in other shards; any other number from the mean."""
    folder, _ = saved
    replicas, shards = MESHES.get(mesh, (2, 1))
    work = partial(goes_on, shards=shards, source=folder / "majority", in_shards=mesh != "unsharded")
    told = launch(tmp_path, replicas * shards, work, seconds=200)
    mean = mean_of_workers(joined(folder, replica) for replica in range(REPLICAS))
    for rank, said in enumerate(told):
        replica, shard = rank // shards, rank % shards
        whole = joined(folder, replica) if replicas == REPLICAS else mean
        found = torch.load(tmp_path / f"{rank}.pt")
        for key, value in whole.items():
            assert torch.equal(found[key], pick(value, shard, shards)), key
        for key, value in buffers(folder, replica if replicas == REPLICAS else None).items():
            assert torch.equal(found[key], value), key
        first = replica * SHARDS if replicas == REPLICAS else 0
        assert said == [first, SAVED, pytest.approx(0.01 * 0.9**SAVED), 0.1, SAVED]
    assert checkpoint.is_complete(tmp_path / "next")


def pick(whole: Tensor, shard: int, shards: int) -> Tensor:
    """The rows that FSDP2 gives to a shard, none to those at the end."""
    pieces = whole.chunk(shards)
    return pieces[shard] if shard < len(pieces) else whole[:0]


def buffers(folder: Path, replica: int | None) -> dict[str, Tensor]:
    """The mean over the ranks of a replica, or over all; of whole numbers the first's."""
    ranks = parts(folder)[slice(None) if replica is None else slice(replica * SHARDS, (replica + 1) * SHARDS)]
    return mean_of_workers({key: x for key, x in rank.items() if key.startswith("buffer/")} for rank in ranks)


def test_a_whole_models_checkpoint_goes_on_in_shards(saved: tuple[Path, Any], tmp_path: Path) -> None:
    """There and back: two replicas whole, and then four ranks again."""
    folder, _ = saved
    (tmp_path / "whole").mkdir(), (tmp_path / "again").mkdir()
    launch(tmp_path / "whole", 2, partial(goes_on, shards=1, source=folder / "majority", in_shards=False), seconds=200)
    source = tmp_path / "whole" / "next"
    told = launch(tmp_path / "again", 4, partial(goes_on, shards=2, source=source), seconds=200)
    assert [said[1] for said in told] == [STEPS] * 4
    rows = Stacked(source)
    for rank in range(4):
        found = torch.load(tmp_path / "again" / f"{rank}.pt")
        momenta = rows.rows([key for key in rows.keys if key.startswith("own/")], rank // 2)
        assert len(momenta) == 7
        for key, value in momenta.items():
            assert torch.equal(found[key.removeprefix("own/")], pick(value, rank % 2, 2))
        for key, value in rows.rows([key for key in rows.keys if key.startswith("buffer/")], rank // 2).items():
            assert torch.equal(found[key], value)


def test_one_process_goes_on_from_the_mean_of_all(saved: tuple[Path, Any]) -> None:
    folder, _ = saved
    run = Run(None, 5)
    assert checkpoint.load(folder / "majority", run.model, run.optimizer)["rank"] == 0
    expected = mean_of_workers(joined(folder, replica) for replica in range(REPLICAS)) | buffers(folder, None)
    assert equal(run.state(), {key: expected[key] for key in run.state()})


def by_torchs_own_way(rank: int, size: int, folder: Path) -> list[bool]:
    """Of torch's options: whether a run with the state it gave goes on as the one that it was taken from."""
    mesh, ended = mesh_of(folder, rank, size), []
    for full in (False, True):
        asked = dcp.StateDictOptions(full_state_dict=full)
        run, other = Run(mesh, 0), Run(mesh, 7)
        run.train(rank, range(SAVED))
        for each in (run, other):
            each.model.zero_grad()
        model, state = (copy.deepcopy(part) for part in dcp.get_state_dict(run.model, run.optimizer, options=asked))
        dcp.set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=state, options=asked)
        run.train(rank, range(SAVED, STEPS)), other.train(rank, range(SAVED, STEPS))
        ended.append(equal(run.state(), other.state()))
    return ended


def test_torchs_own_state_dicts_keep_each_replicas_momenta(tmp_path: Path) -> None:
    assert launch(tmp_path, REPLICAS * SHARDS, by_torchs_own_way, seconds=200) == [[True, True]] * 4


def adapts(rank: int, size: int, folder: Path) -> list[Any]:
    """A frozen layer in shards, held twice; what trains is whole, and all four ranks vote on it."""
    mesh, ended = mesh_of(folder, rank, size), []
    for seed in (0, 7):
        model = nn.Sequential(nn.Linear(37, 11), nn.Linear(11, 5))
        torch.manual_seed(seed)
        for param in model.parameters():
            param.data = torch.randn(param.shape)
        model[0].requires_grad_(False)
        fully_shard(model[0], mesh=mesh["shard"])
        optimizer = Distributed(model[1].named_parameters(), lr=0.01)
        if seed == 0:
            backward(model, rank, 0)
            optimizer.step()
            checkpoint.save(folder / "a", model, optimizer, extra=rank)
        else:
            assert checkpoint.load(folder / "a", model, optimizer) == rank
        momenta = [optimizer.state[param]["exp_avg"] for param in model[1].parameters()]
        ended.append([local(tensor).detach().clone() for tensor in (*model.parameters(), *momenta)])
    return [torch.equal(a, b) for a, b in zip(*ended, strict=True)]


def test_what_is_frozen_may_be_sharded_over_ranks_that_vote(tmp_path: Path) -> None:
    assert launch(tmp_path, REPLICAS * SHARDS, adapts, seconds=200) == [[True] * 6] * 4
    assert checkpoint.verify(tmp_path / "a").workers == 4
    index = FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert [tuple(chunk.offsets) for chunk in index["parameter/0.weight"].chunks] == [(0, 0), (6, 0)]
