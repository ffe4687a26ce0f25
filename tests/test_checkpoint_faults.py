"""Checkpoints that are damaged or of something else: a named error on every worker, and nothing changed."""

import copy
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import equal, flipped, fresh, train, trained, whole
from torch import nn
from world import succeed, world

from dlion import Distributed, checkpoint
from dlion.errors import CheckpointError


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints `early` and `late` of two workers."""
    folder = tmp_path_factory.mktemp("pair")

    def work(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = trained(3, group, rank)
        checkpoint.save(folder / "late-or-not", model, optimizer)
        train(model, optimizer, rank, range(3, 5))
        checkpoint.save(folder / "a-late-one", model, optimizer)

    succeed(world(2, work))
    return folder


EARLY, LATE = "late-or-not", "a-late-one"
FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json")


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda whole: None,
    "flipped": flipped,
    "cut": lambda whole: whole[:-1],
    "empty": lambda whole: b"",
    "grown": lambda whole: whole + b"\n}",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_on_every_worker_before_anything_is_unpickled(name: str, damage: str, pair: Path) -> None:
    victim = pair / LATE / name
    intact = victim.read_bytes()
    changed = DAMAGE[damage](intact)

    def work(rank: int, group: dist.ProcessGroup) -> str:
        model, optimizer = trained(1, group, rank)
        before = whole(model, optimizer)
        with pytest.raises(CheckpointError) as error:
            checkpoint.load(pair / LATE, model, optimizer)
        assert equal(before, whole(model, optimizer))
        return str(error.value)

    try:
        victim.unlink() if changed is None else victim.write_bytes(changed)
        said = succeed(world(2, work))
        assert said[0] == said[1] and str(pair / LATE) in said[0] and "\n" not in said[0]
        assert "is damaged" in said[0] or "holds no complete checkpoint" in said[0]
        assert not checkpoint.is_complete(pair / LATE)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert checkpoint.latest(pair) == pair / EARLY
        # a folder without a manifest is not a checkpoint that was damaged: it has never been complete
        assert [str(each.message).startswith(f"the checkpoint {pair / LATE} is damaged") for each in warned] == [
            True
        ] * ((name, damage) != ("manifest.json", "gone"))
    finally:
        victim.write_bytes(intact)
    assert checkpoint.is_complete(pair / LATE) and checkpoint.latest(pair) == pair / LATE


def change(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def act(manifest: dict[str, Any]) -> None:
        inner = manifest
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = to

    return act


def test_a_pipe_in_the_place_of_a_file_is_damage_and_nobody_waits_for_it(pair: Path) -> None:
    victim = next((pair / LATE).glob("*.distcp"))
    intact = victim.read_bytes()
    victim.unlink()
    os.mkfifo(victim)
    try:
        with pytest.warns(UserWarning, match="a pipe and no file"):
            assert checkpoint.latest(pair) == pair / EARLY
    finally:
        victim.unlink()
        victim.write_bytes(intact)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (change("format", to=3), "has format 3 and this version of dlion reads format 2"),
        (change("format", to="1"), "has no format"),
        (change("workers", to=0), "lists no files of workers"),
        (change("workers", to=True), "workers in manifest.json is 'True'"),
        (change("t", to=None), "t in manifest.json is 'None'"),
        (change("notes", to=[]), "notes in manifest.json"),
        (change("files", "../late-or-not/.metadata", to={"bytes": 1, "sha256": ""}), "lists no files"),
        (change("files", "x", to={"bytes": 1}), "lists no files"),
        (change("files", "x", to={"bytes": 1, "sha256": ""}), "x is missing"),
    ],
)
def test_a_manifest_is_not_believed_blindly(act: Callable[[Any], None], said: str, pair: Path) -> None:
    victim = pair / LATE / "manifest.json"
    intact = victim.read_bytes()
    manifest = json.loads(intact)
    act(manifest)
    try:
        victim.write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=said):
            checkpoint.verify(pair / LATE)
    finally:
        victim.write_bytes(intact)


@pytest.mark.parametrize("text", ["", "null", "[]", "[" * 100_000, "1" * 5000, "\xff", '{"format": 2}'])
def test_what_is_no_manifest_is_a_named_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError):
        checkpoint.verify(tmp_path)
    assert not checkpoint.is_complete(tmp_path)


@pytest.mark.parametrize("where", ["nothing", "file", "file/inside"])
def test_what_is_no_checkpoint_says_so(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    model, optimizer = trained(1)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        checkpoint.load(tmp_path / where, model, optimizer)
    assert checkpoint.latest(tmp_path) is None


# ---- of something else


def test_another_model_or_optimizer_is_refused_and_nothing_changes(pair: Path) -> None:
    class Other(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    def shaped() -> nn.Module:
        model = fresh()
        model[2] = nn.Linear(70, 4)
        return model

    def unbuffered() -> nn.Module:
        model = fresh()
        model[1].register_buffer("more", torch.zeros(1))
        return model

    for model, groups, method, said in (
        (Other(fresh()), 1, "dlion-mavo", "the parameter inner.2.weight is not in the checkpoint"),
        (shaped(), 1, "dlion-mavo", r"the parameter 2.weight has shape \[4, 70\] and \[3, 70\] in the checkpoint"),
        (unbuffered(), 1, "dlion-mavo", "the buffer 1.more is not in the checkpoint"),
        (fresh(), 2, "dlion-mavo", "the optimizer has 2 parameter groups and 1 were saved"),
        (fresh(), 1, "g-lion", "saved with method 'dlion-mavo' and the optimizer has 'g-lion'"),
    ):
        params = list(model.parameters())
        parts = [{"params": params[:1]}, {"params": params[1:]}] if groups == 2 else params
        optimizer = Distributed(parts, method, lr=0.5)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(pair / EARLY, model, optimizer)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match="none of the model's"):
        checkpoint.save(tmp_path / "a", fresh(), optimizer)
    with pytest.raises(CheckpointError, match="cannot be loaded without running its code"):
        checkpoint.save(tmp_path / "a", model, optimizer, extra={"model": model})
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        checkpoint.save(tmp_path / "a", model, optimizer, notes={"x": model})
    with pytest.raises(ValueError, match="timeout=0 must be a positive number"):
        checkpoint.save(tmp_path / "a", model, optimizer, timeout=0)
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "a", model, optimizer, notes={"nan": float("nan")})
    with pytest.raises(CheckpointError, match="exists already: give each checkpoint a new name"):
        checkpoint.save(tmp_path / "a", model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_files_that_are_kept_inside_are_covered(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("some words")
    model, optimizer = trained()
    checkpoint.save(tmp_path / "a", model, optimizer, files={"tokens.txt": tmp_path / "words.txt"})
    os.replace(tmp_path / "a" / "tokens.txt", tmp_path / "kept")  # a link to the original: files are replaced
    (tmp_path / "a" / "tokens.txt").write_text("some worse")
    assert not checkpoint.is_complete(tmp_path / "a")
    with pytest.raises(CheckpointError, match="nowhere, is not there: give the path of a file"):
        checkpoint.save(tmp_path / "b", model, optimizer, files={"x": tmp_path / "nowhere"})


def test_states_that_differ_are_named(tmp_path: Path) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        model, optimizer = trained(2, group, rank)
        if rank == 2:
            del optimizer.state[model[0].weight]
        with pytest.raises(CheckpointError) as error:
            checkpoint.save(tmp_path / "a", model, optimizer)
        return str(error.value)

    said = succeed(world(3, work))
    assert len(set(said)) == 1 and "the state of rank 2 is not that of rank 0" in said[0] and "0.weight" in said[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp", ".metadata", "../out", "a\nb", "", "."])
def test_files_cannot_take_the_names_of_a_checkpoints_own(name: str, tmp_path: Path) -> None:
    """A file of the caller's was linked under such a name, and then written over."""
    model = fresh()
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(CheckpointError, match="give a plain one"):
        checkpoint.save(tmp_path / "one", model, Distributed(model.parameters()), files={name: tmp_path / "mine"})
    assert (tmp_path / "mine").read_text() == "precious"
    assert not (tmp_path / "one").exists()


def test_alone_too_one_is_written_after_another_wherever_the_process_works_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh()
    optimizer = Distributed(model.parameters())
    monkeypatch.chdir(tmp_path)
    first = checkpoint.save("one", model, optimizer, extra=1, asynchronous=True)
    with pytest.warns(UserWarning, match="nobody waited for it"):
        second = checkpoint.save("one", model, optimizer, extra=2, asynchronous=True)  # it exists by then
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoint.save(tmp_path / "two", model, optimizer)
    first.wait()
    assert isinstance(second.error, CheckpointError)
    assert checkpoint.load(tmp_path / "one", model, optimizer) == 1


def test_a_bad_argument_of_one_worker_is_an_error_of_all_at_once(tmp_path: Path) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        model = fresh()
        optimizer = Distributed(model.parameters(), process_group=group)
        notes: Any = [1, 2] if rank == 0 else None
        with pytest.raises(CheckpointError) as told:
            checkpoint.save(tmp_path / "one", model, optimizer, notes=notes)
        return str(told.value)

    assert all("rank 0" in said for said in succeed(world(2, work)))
