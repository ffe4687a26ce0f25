"""Sharded models: what is wrong on one rank is heard on all at once, kills lose nothing, and who else may be there."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hsdp_runs import REPLICAS, SHARDS, backward, mesh_of, refusal, sharded
from processes import launch, meet
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dlion import Distributed, checkpoint, local_gradients
from dlion.checkpoint.chunks import Chunk
from dlion.checkpoint.manifest import Manifest
from dlion.checkpoint.mesh import check_seats, ranks_of_mesh
from dlion.checkpoint.stacked import Part, Stacked
from dlion.errors import CheckpointError, ExchangeError
from dlion.layout import local

pytestmark = pytest.mark.timeout(240)  # four processes on two cores
SECONDS = 60  # that ranks wait for each other


def trained(mesh: DeviceMesh, rank: int, steps: int = 1, **options: Any) -> tuple[nn.Module, Distributed]:
    group = mesh["replicate"].get_group()
    model = local_gradients(sharded(mesh["shard"], seed=rank // SHARDS), group)
    optimizer = Distributed(model.named_parameters(), lr=0.01, process_group=group, timeout=SECONDS, **options)
    for step in range(steps):
        backward(model, rank, step)
        optimizer.step()
    return model, optimizer


def another_shape(mesh: DeviceMesh) -> tuple[nn.Module, Distributed]:
    """Of 12 rows and of 11 the first of two ranks holds 6."""
    model = sharded(mesh["shard"], 0)
    model[0] = nn.Linear(37, 12)
    fully_shard(model[0], mesh=mesh["shard"])
    return model, Distributed(model.parameters(), process_group=mesh["replicate"].get_group(), timeout=SECONDS)


def on_two_meshes(mesh: DeviceMesh) -> tuple[nn.Module, Distributed]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model[1], mesh=mesh["replicate"])
    return model, Distributed(model.named_parameters(), process_group=mesh["replicate"].get_group(), timeout=SECONDS)


def over_both_dimensions(mesh: DeviceMesh) -> tuple[nn.Module, Distributed]:
    model = sharded(mesh, 0)
    group = mesh["replicate"].get_group()
    return model, Distributed(model.named_parameters(), process_group=group, timeout=SECONDS)


WANTED = [
    "rank 1: path='' is no path",
    "rank 3: optimizer=None is none of dlion's",
    "rank 2: model=None is no torch.nn.Module",
    "rank 1: 0.weight is sharded over ranks 0, 1, and ranks 0, 1 of them vote on it together",
    "rank 0: 0.weight is sharded over ranks 0, 1, and ranks 0, 1 of them vote on it together",
    "rank 3: timeout=-1 must be a positive number",
    "rank 2 is in load() and rank 0 in save()",
    "rank 3 saves 'other' and rank 0 'new'",
    "rank 1: extra= (or a hyper-parameter) holds what cannot be loaded",
    "rank 0: 0.weight is sharded over ranks 0, 1 and 1.weight over ranks 0, 2, and one worker is one set of ranks",
    "rank 0: 0.weight is sharded over ranks 0, 1, 2, 3, and ranks 0, 2 of them vote on it together",
    "rank 0: the momentum_buffer of 0.weight is made for this rank's shard",
    "rank 2: nowhere holds no complete checkpoint",
    "rank 0: the parameter 0.weight has shape [12, 37] and [11, 37] in the checkpoint",
]


def is_refused(rank: int, size: int, folder: Path) -> list[list[Any]]:
    """What is said, and after how many seconds."""
    os.chdir(folder)
    mesh = mesh_of(folder, rank, size)
    model, optimizer = trained(mesh, rank)
    checkpoint.save("kept", model, optimizer, extra=rank)
    before = [local(value).clone() for value in (*model.parameters(), *momenta(model, optimizer))]
    save: Callable[..., Any] = partial(checkpoint.save, "new", model, optimizer)
    inner = mesh["shard"].get_group()
    shaped, meshes, both = another_shape(mesh), on_two_meshes(mesh), over_both_dimensions(mesh)
    flat = trained(mesh, rank, method="graddrop")
    attempts: list[Callable[[], Any]] = [
        lambda: checkpoint.save("" if rank == 1 else "new", model, optimizer),
        lambda: checkpoint.save("new", model, None if rank == 3 else optimizer),  # type: ignore[arg-type]
        lambda: checkpoint.save("new", None if rank == 2 else model, optimizer),  # type: ignore[arg-type]
        lambda: save(process_group=inner if rank == 1 else None),
        lambda: save(process_group=dist.group.WORLD),
        lambda: save(timeout=-1 if rank == 3 else None),
        lambda: checkpoint.load("kept", model, optimizer) if rank == 2 else save(),
        lambda: checkpoint.save("other" if rank == 3 else "new", model, optimizer),
        lambda: save(extra=refusal if rank == 1 else None),
        lambda: checkpoint.save("new", *meshes),
        lambda: checkpoint.save("new", *both),
        lambda: checkpoint.save("new", *flat),
        lambda: checkpoint.load("nowhere" if rank == 2 else "kept", model, optimizer),
        lambda: checkpoint.load("kept", *shaped),
    ]
    said = []
    for attempt in attempts:
        began = time.monotonic()
        said.append([refusal(attempt), time.monotonic() - began])
    after = [local(value) for value in (*model.parameters(), *momenta(model, optimizer))]
    assert all(map(torch.equal, before, after)) and not shaped[1].state
    assert checkpoint.load("kept", model, optimizer) == rank
    assert [path.name for path in Path().iterdir() if path.is_dir()] == ["kept"]
    return said


def momenta(model: nn.Module, optimizer: Distributed) -> list[torch.Tensor]:
    return [optimizer.state[param]["exp_avg"] for param in model.parameters()]


@pytest.mark.processes
def test_what_one_rank_gives_is_every_ranks_error_at_once(tmp_path: Path) -> None:
    for said in launch(tmp_path, REPLICAS * SHARDS, is_refused, seconds=200):
        for (text, seconds), wanted in zip(said, WANTED, strict=True):
            assert wanted in text and "\n" not in text and seconds < SECONDS / 2


def test_every_shard_of_every_worker_must_be_there_once() -> None:
    check_seats([[0, 0, 0, 2, 2], [1, 0, 1, 2, 2], [0, 1, 0, 2, 2], [1, 1, 1, 2, 2]], range(4))
    with pytest.raises(CheckpointError, match="rank 1 and rank 2 both hold shard 1 of worker 0: make one mesh"):
        check_seats([[0, 0, 0, 2, 2], [0, 1, 0, 2, 2], [0, 1, 0, 2, 2], [1, 1, 1, 2, 2]], range(4))
    with pytest.raises(CheckpointError, match="rank 1 counts 1 workers of 4 ranks each and rank 0 2 of 2: make one"):
        check_seats([[0, 0, 0, 2, 2], [0, 1, 0, 1, 4]], range(2))
    with pytest.raises(CheckpointError, match="rank 2 votes as worker 0 and holds shards of another replica"):
        # the mesh [[0, 3], [1, 2]]: torch sorts the voters [0, 1] and [2, 3]
        check_seats([[0, 0, 0, 2, 2], [1, 0, 1, 2, 2], [0, 1, 1, 2, 2], [1, 1, 0, 2, 2]], range(4))


def test_a_mesh_of_some_ranks_must_be_regular(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    assert ranks_of_mesh([1, 3], [2, 3]) == [0, 1, 2, 3]
    assert ranks_of_mesh([0, 3, 5], [2, 3]) == list(range(6))  # all there are, in whatever order
    with pytest.raises(CheckpointError, match="ranks 3, 5 vote and ranks 3, 4 hold shards, and no regular mesh has"):
        ranks_of_mesh([3, 5], [3, 4])


def test_a_part_that_nobody_holds_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is written, and where such a file came to be all the same."""
    half = {"parameter/x": Chunk(torch.ones(2), (0,), (4,))}
    part = Part(0, half, {}, {"parameter/x"}, [], "worker/0", b"")
    places = part.write(tmp_path)
    with pytest.raises(CheckpointError, match="parameter/x has 4 elements and the ranks that save hold 2 of them"):
        part.write_index(tmp_path, places)
    monkeypatch.setattr("dlion.checkpoint.stacked._check_whole", lambda index: None)
    part.write_index(tmp_path, places)
    assert torch.equal(Stacked(tmp_path).common(["parameter/x"], half)["parameter/x"], torch.ones(2))
    with pytest.raises(ValueError, match="parameter/x is not all there"):
        Stacked(tmp_path).common(["parameter/x"])


def is_killed(rank: int, size: int, folder: Path, victim: int, place: tuple[type, str]) -> str:
    """Save once, and be killed in the second saving, which leaves a file half written."""
    model, optimizer = trained(mesh_of(folder, rank, size), rank)
    checkpoint.save(folder / "saved" / "first", model, optimizer, extra=rank)
    owner, name = place
    whole = getattr(owner, name)

    def half(self: Any, drafted: Path, *rest: Any) -> None:
        whole(self, drafted, *rest)
        newest = max(drafted.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.truncate(newest, newest.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        setattr(owner, name, half)
    try:
        checkpoint.save(folder / "saved" / "second", model, optimizer)
    except ExchangeError as error:
        return str(error)
    return "nothing"


def goes_on(rank: int, size: int, folder: Path) -> list[Any]:
    found = checkpoint.latest(folder / "saved")
    assert found is not None
    model, optimizer = trained(mesh_of(folder, rank, size), rank, steps=0)
    told = checkpoint.load(found, model, optimizer)
    checkpoint.save(folder / "saved" / "second", model, optimizer)
    return [found.name, told, optimizer.param_groups[0]["t"]]


@pytest.mark.processes
@pytest.mark.parametrize(("victim", "place"), [(3, (Part, "write")), (0, (Manifest, "write"))])
def test_a_kill_while_saving_leaves_the_last_one(victim: int, place: tuple[type, str], tmp_path: Path) -> None:
    told = launch(tmp_path, 4, partial(is_killed, victim=victim, place=place), seconds=100)
    assert told.pop(victim) == -signal.SIGKILL
    assert all("lost" in said for said in told)
    (tmp_path / "store").unlink()
    assert launch(tmp_path, 4, goes_on, seconds=100) == [["first", rank, 1] for rank in range(4)]
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["first", "second"] and checkpoint.is_complete(tmp_path / "saved" / "second")


def beside_another(rank: int, size: int, folder: Path) -> bool:
    """Four of five ranks are the mesh."""
    meet(folder, "store", rank, size)
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    if rank < 4:
        model, optimizer = trained(mesh, rank)
        checkpoint.save(folder / "a", model, optimizer, extra=rank)
        other, again = trained(mesh, rank, steps=0)
        assert checkpoint.load(folder / "a", other, again) == rank
        return all(map(torch.equal, map(local, momenta(model, optimizer)), map(local, momenta(other, again))))
    return checkpoint.latest(folder) is None or checkpoint.is_complete(folder / "a")


@pytest.mark.processes
def test_ranks_that_are_not_of_the_mesh_need_not_come(tmp_path: Path) -> None:
    assert launch(tmp_path, 5, beside_another, seconds=200) == [True] * 5
