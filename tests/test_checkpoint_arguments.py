"""What is given to save and load and is no good: one sentence, on every worker, within seconds, and nothing changed."""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import launch, meet
from small_runs import equal, fresh, simulate, train, trained, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from world import succeed, world

from dlion import Distributed, Simulation, checkpoint
from dlion.elastic.elastic import Elastic
from dlion.errors import CheckpointError

SECONDS = 30  # that workers wait for each other


class Closed:
    """A path that raises what nobody expects of one."""

    def __fspath__(self) -> str:
        raise RuntimeError("the archive is closed")


# the argument that one worker gives, and what all then hear
ANY_CALL: list[tuple[dict[str, Any], str]] = [
    ({"path": ""}, "path='' is no path"),
    ({"path": None}, "path=None is no path"),
    ({"path": 7}, "path=7 is no path"),
    ({"path": b"a"}, "path=b'a' is no path"),
    ({"path": "a\0b"}, r"path='a\x00b' is no path"),
    ({"path": "a\ud800"}, r"path='a\ud800' is no path"),
    ({"model": None}, "model=None is no torch.nn.Module"),
    ({"model": "model"}, "model='model' is no torch.nn.Module"),
    ({"optimizer": None}, "optimizer=None is none of dlion's"),
    ({"optimizer": torch.optim.SGD(fresh().parameters())}, "optimizer=a torch.optim.sgd.SGD is none of dlion's"),
    ({"process_group": "gloo"}, "process_group='gloo' must be a torch.distributed ProcessGroup"),
    ({"process_group": 7}, "process_group=7 must be a torch.distributed ProcessGroup"),
    ({"process_group": dist.GroupMember.NON_GROUP_MEMBER}, "process_group=-100: this worker is not a member"),
    ({"process_group": torch.ones(2)}, "process_group=tensor([1., 1.]) must be a torch.distributed ProcessGroup"),
    ({"path": Closed()}, "RuntimeError: the archive is closed"),
    ({"timeout": torch.empty(1, device="meta")}, "must be a positive number of seconds"),
    ({"timeout": -1}, "timeout=-1 must be a positive number of seconds"),
    ({"timeout": math.nan}, "timeout=nan must be a positive number of seconds"),
    ({"timeout": "soon"}, "timeout='soon' must be a positive number of seconds"),
]
SAVE: list[tuple[dict[str, Any], str]] = [
    ({"path": "."}, "path='.' does not end in a name"),
    ({"path": "/"}, "path='/' does not end in a name"),
    ({"path": "a/.."}, "path='a/..' does not end in a name"),
    ({"path": ".hidden"}, "path='.hidden' does not end in a name"),
    ({"path": "a\x1b[1mb"}, r"path='a\x1b[1mb' does not end in a name"),
    ({"path": "é" * 121}, "give one of 1 to 240 bytes"),
    ({"path": "another"}, "saves 'another' and rank 0 'one'"),
    ({"asynchronous": "yes"}, "asynchronous='yes' must be True or False"),
    ({"extra": math.sin}, "extra= (or a hyper-parameter) holds what cannot be loaded"),
    ({"notes": [1, 2]}, "notes=[1, 2] is no dictionary"),
    ({"notes": {"x": {1}}}, "notes= holds what JSON cannot say (Object of type set"),
    ({"files": 5}, "files=5 is no dictionary"),
    ({"files": {"a/b": "c"}}, "files= has the name 'a/b'"),
    ({"files": {"a": 3}}, "files['a']=3 is no path"),
]
LOAD: list[tuple[dict[str, Any], str]] = [
    ({"path": "nowhere"}, "nowhere holds no complete checkpoint"),
    ({"path": "x" * 300}, "holds no complete checkpoint (manifest.json: File name too long)"),
]


def call(name: str, arguments: dict[str, Any]) -> Any:
    """`save` or `load`; what is given asynchronously is waited for."""
    path, model, optimizer = (arguments.pop(key) for key in ("path", "model", "optimizer"))
    ended = getattr(checkpoint, name)(path, model, optimizer, **arguments)
    return ended.wait() if name == "save" else ended


@pytest.mark.parametrize(("name", "cases"), [("save", [*ANY_CALL, *SAVE]), ("load", [*ANY_CALL, *LOAD])])
def test_what_one_worker_gives_is_every_workers_error_at_once(
    name: str, cases: list[tuple[dict[str, Any], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another on the same workers, who can save and load after all that."""
    monkeypatch.chdir(tmp_path)

    def work(rank: int, group: dist.ProcessGroup) -> list[tuple[str, float]]:
        model, optimizer = trained(1, group, rank)
        given = {"path": "one", "model": model, "optimizer": optimizer, "process_group": group}
        if name == "load":
            checkpoint.save(tmp_path / "one", model, optimizer)
        before, said = whole(model, optimizer), []
        for wrong, _ in cases:
            began = time.monotonic()
            with pytest.raises(CheckpointError) as error:
                call(name, given | (wrong if rank == 1 else {}))
            said.append((str(error.value), time.monotonic() - began))
        assert equal(before, whole(model, optimizer))
        checkpoint.save(tmp_path / "last", model, optimizer, extra=rank, timeout=20 + rank)
        assert checkpoint.load(tmp_path / "last", model, optimizer) == rank
        return said

    for said in succeed(world(2, work, SECONDS)):
        for (text, seconds), (_, wanted) in zip(said, cases, strict=True):
            assert "rank 1" in text and wanted in text and text.isprintable() and seconds < SECONDS / 2
    assert {path.name for path in tmp_path.iterdir()} == {"last"} | ({"one"} if name == "load" else set())


def test_a_worker_that_saves_while_another_one_loads_is_named(tmp_path: Path) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        model, optimizer = trained(1, group, rank)
        with pytest.raises(CheckpointError) as error:
            call(("save", "load")[rank], {"path": tmp_path / "a", "model": model, "optimizer": optimizer})
        return str(error.value)

    for said in succeed(world(2, work)):
        assert "rank 1 is in load() and rank 0 in save(): all workers call the same, in the same order" in said


def astray(rank: int, size: int, folder: Path) -> list[str]:
    """Rank 1's optimizer does not say who the workers are: the default group does."""
    meet(folder, "store", rank, size)
    model = fresh()
    ours, other = Distributed(model.parameters()), torch.optim.SGD(model.parameters())
    checkpoint.save(folder / "a", model, ours)
    said = []
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.load(None if rank else folder / "a", model, ours),  # type: ignore[arg-type]
        lambda: checkpoint.load(folder / "a", model, other if rank else ours),  # type: ignore[arg-type]
        lambda: checkpoint.save("" if rank else folder / "b", model, ours, asynchronous=True).wait(),
        lambda: checkpoint.save(folder / "b", model, ours, timeout=5 if rank else 0),
    ]
    for each in calls:
        with pytest.raises(CheckpointError) as error:
            each()
        said.append(str(error.value))
    checkpoint.save(folder / "b", model, ours)
    return said


@pytest.mark.processes
def test_real_processes_hear_it_too(tmp_path: Path) -> None:
    for said in launch(tmp_path, 2, astray):
        for text, wanted in zip(said, ("path=None", "optimizer=a torch.optim", "path=''", "timeout=0"), strict=True):
            assert wanted in text and f"rank {'0' if wanted == 'timeout=0' else '1'}: " in text


def outside(rank: int, size: int, folder: Path) -> str:
    """Rank 0 saves in a group of its own, and hears nothing of rank 1, whose optimizer would vote with rank 0."""
    meet(folder, "store", rank, size)
    model, optimizer = trained(1)
    alone = dist.new_group([0])
    if rank == 0:
        checkpoint.save(folder / "a", model, optimizer, process_group=alone)
        return ""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="process_group=-100") as error:
        patch.setattr("dlion.checkpoint.crew.STRAY", timedelta(seconds=0.5))
        checkpoint.save(folder / "a", model, optimizer, process_group=alone)
    return str(error.value)


@pytest.mark.processes
def test_who_is_not_in_the_group_is_told_so_although_nobody_waits(tmp_path: Path) -> None:
    assert "this worker is not a member of the group" in launch(tmp_path, 2, outside)[1]
    assert checkpoint.is_complete(tmp_path / "a")


@pytest.mark.parametrize("name", ["verify", "is_complete", "latest"])
@pytest.mark.parametrize("path", [None, "", 7, "a\0b"])
def test_who_looks_for_checkpoints_must_give_a_path(name: str, path: Any) -> None:
    with pytest.raises(CheckpointError, match="is no path: give text that is not empty"):
        getattr(checkpoint, name)(path)


def test_files_are_kept_whatever_leads_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to a relative symbolic link pointed to nowhere from inside the checkpoint."""
    (tmp_path / "words.txt").write_text("some words")
    (tmp_path / "link").symlink_to("words.txt")
    monkeypatch.chdir(tmp_path)
    model, optimizer = trained(1)
    checkpoint.save("a", model, optimizer, files={"x": "link", "y": "words.txt"})
    assert [(tmp_path / "a" / name).read_text() for name in "xy"] == ["some words"] * 2
    assert not (tmp_path / "a" / "x").is_symlink() and checkpoint.is_complete("a")
    (tmp_path / "broken").symlink_to("gone")
    for source, said in (("broken", "is not there"), ("gone", "is not there"), (tmp_path, "is no file")):
        with pytest.raises(CheckpointError, match=rf"files\['z'\], .*{said}: give the path of a file"):
            checkpoint.save("b", model, optimizer, files={"z": source})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "broken", "link", "words.txt"]


def test_an_elastic_worker_saves_with_its_round_and_loads_by_itself(tmp_path: Path) -> None:
    model = fresh()
    elastic = Elastic(model.parameters(), lighthouse="127.0.0.1:1", worker=1, workers=2)
    with pytest.raises(CheckpointError, match=r"finds its workers in step\(\): save after one"):
        checkpoint.save(tmp_path / "a", model, elastic)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        checkpoint.save(tmp_path / "a", *trained(2, group, rank), extra=rank)

    succeed(world(2, work))
    assert checkpoint.load(tmp_path / "a", model, elastic) == 1 and elastic.param_groups[0]["t"] == 2


def test_within_a_step_nothing_is_saved_or_loaded(tmp_path: Path) -> None:
    """Momenta have moved by then, and parameters have not; loading came as far as the parameters."""
    model, ended = trained(1)
    checkpoint.save(tmp_path / "a", model, ended)
    model = fresh()
    optimizer = Distributed(model.parameters(), overlap=True)
    train(model, optimizer, 0, range(1))
    torch.autograd.backward(model(torch.ones(2, 5)).sum())
    simulation = Simulation(fresh(), workers=2)
    simulate(simulation, range(1))
    with simulation.worker(0):
        torch.autograd.backward(simulation.model(torch.ones(2, 5)).sum())
    for net, begun in ((model, optimizer), (simulation.model, simulation)):
        before = whole(net, begun)
        with pytest.raises(CheckpointError, match="loaded within a step: do it before backward, or after step"):
            checkpoint.load(tmp_path / "a", net, begun)
        with pytest.raises(CheckpointError, match="saved within a step"):
            checkpoint.save(tmp_path / "b", net, begun)
        assert equal(before, whole(net, begun))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def in_shards(rank: int, size: int, folder: Path) -> list[str]:
    """A model with one DTensor that is frozen, and one that is a buffer."""
    meet(folder, "store", rank, size)
    model, plain = fresh(), fresh()
    checkpoint.save(folder / "a", plain, Distributed(plain.parameters()))
    placed = distribute_tensor(model[2].weight.data + 1, init_device_mesh("cpu", (size,)), [Replicate()])
    model[2].weight = nn.Parameter(placed, requires_grad=False)
    optimizer = Distributed([param for param in model.parameters() if param.requires_grad])
    checkpoint.save(folder / "b", model, optimizer)
    model[1].running_mean = distribute_tensor(torch.zeros(70), init_device_mesh("cpu", (size,)), [Replicate()])
    said = []
    for each in (checkpoint.save, checkpoint.load):
        with pytest.raises(CheckpointError) as error:
            each(folder / "c" if each is checkpoint.save else folder / "a", model, optimizer)
        said.append(str(error.value))
    return said


@pytest.mark.processes
def test_a_frozen_parameter_may_be_sharded_and_a_buffer_may_not(tmp_path: Path) -> None:
    """What is in the checkpoint then is what a whole model has."""
    for text in launch(tmp_path, 1, in_shards)[0]:
        assert "the buffer 1.running_mean is sharded (a DTensor), and dlion.checkpoint shards parameters" in text
    model = fresh()
    kept = model[2].weight.detach().clone()
    others = [param for param in model.parameters() if param is not model[2].weight]
    checkpoint.load(tmp_path / "b", model, Distributed(others))
    assert torch.equal(model[2].weight, kept + 1)
