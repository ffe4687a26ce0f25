"""Two runs that save to one path: one whole checkpoint, a named error for the other, and no lock for ever."""

import fcntl
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import launch, meet
from small_runs import trained
from world import world

from dlion import checkpoint
from dlion.checkpoint.draft import Draft
from dlion.errors import CheckpointError, ExchangeError

PLACES = ["open", "write", "publish"]


@pytest.mark.parametrize("place", PLACES)
def test_of_two_runs_one_wins_wherever_they_meet(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two workers, who all come to the same place before anybody goes on."""
    met = threading.Barrier(4 if place == "write" else 2, timeout=30)
    act = getattr(Draft, place)

    def together(draft: Draft, *rest: Any) -> Any:
        met.wait()
        return act(draft, *rest)

    monkeypatch.setattr(Draft, place, together)
    ended: list[list[Any]] = [[], []]
    runs = [
        threading.Thread(target=lambda run=run: ended[run].extend(world(2, partial(save_in, tmp_path, run))))
        for run in range(2)
    ]
    for each in runs:
        each.start()
    for each in runs:
        each.join()
    won = [run for run in range(2) if ended[run] == [None, None]]
    assert len(won) == 1, ended
    for error in ended[1 - won[0]]:
        assert isinstance(error, CheckpointError)
        assert f"rank 0: {tmp_path / 'a'} exists already: give each checkpoint a new name" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    model, optimizer = trained(5)
    assert checkpoint.load(tmp_path / "a", model, optimizer) == (won[0], 0)
    assert optimizer.param_groups[0]["t"] == won[0] + 1


def save_in(folder: Path, run: int, rank: int, group: dist.ProcessGroup) -> None:
    """What a worker of a run does: the runs differ in their steps."""
    model, optimizer = trained(run + 1, group, rank)
    checkpoint.save(folder / "a", model, optimizer, extra=(run, rank))


def test_what_a_killed_attempt_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    names = [".a.01234567.tmp", ".a.89abcdef.tmp", ".b.01234567.tmp", ".a.tmp", ".a.0123.tmp"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_text("half of a file")
    (tmp_path / ".a.fedcba98.tmp").write_text("no folder")
    living = os.open(tmp_path / names[1], os.O_RDONLY)
    try:
        fcntl.flock(living, fcntl.LOCK_EX)  # as another process has it while it writes
        checkpoint.save(tmp_path / "a", *trained(1))
    finally:
        os.close(living)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names[1:], ".a.fedcba98.tmp", "a"])
    assert (tmp_path / names[1] / "__0_0.distcp").exists()
    assert checkpoint.latest(tmp_path) == tmp_path / "a"


def test_a_file_system_without_locks_keeps_what_others_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", none)
    (tmp_path / ".a.01234567.tmp").mkdir()
    checkpoint.save(tmp_path / "a", *trained(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.01234567.tmp", "a"]
    assert checkpoint.is_complete(tmp_path / "a")


def test_an_attempt_that_was_taken_for_a_dead_one_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the making of its folder and the lock somebody else may delete it."""
    made, mkdir = [], os.mkdir

    def deleted_once(path: Any, *rest: Any) -> None:
        mkdir(path, *rest)
        if str(path).endswith(".tmp"):
            made.append(Path(path).name)
            if len(made) == 1:
                os.rmdir(path)

    monkeypatch.setattr("os.mkdir", deleted_once)
    checkpoint.save(tmp_path / "a", *trained(1))
    assert len(made) == 2 and made[0] != made[1] and checkpoint.is_complete(tmp_path / "a")


@pytest.mark.slow
def test_a_lost_worker_leaves_no_draft(tmp_path: Path) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = trained(1, group, rank)
        checkpoint.save(tmp_path / "before", model, optimizer)
        if rank == 0:
            checkpoint.save(tmp_path / "a", model, optimizer, timeout=1)

    assert str(world(2, work)[0]).startswith("rank 0 of 2 lost another worker: rank 1 did not arrive within 1.")
    assert [path.name for path in tmp_path.iterdir()] == ["before"]


def dying(dead: int, rank: int, size: int, folder: Path) -> list[str]:
    """One worker dies while all write; what the other one finds then."""
    meet(folder, "store", rank, size)
    model, optimizer = trained(1, dist.group.WORLD, rank)
    write = Draft.write

    def end(draft: Draft, parts: Any) -> Any:
        return os._exit(9) if rank == dead else write(draft, parts)

    Draft.write = end  # type: ignore[method-assign]
    with pytest.raises(ExchangeError):
        checkpoint.save(folder / "saved" / "a", model, optimizer)
    return [path.name for path in (folder / "saved").iterdir()]


@pytest.mark.processes
@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_worker_leaves_no_draft(dead: int, tmp_path: Path) -> None:
    """Even that of worker 0, who made it: who lives deletes it."""
    assert launch(tmp_path, 2, partial(dying, dead))[1 - dead] == []
