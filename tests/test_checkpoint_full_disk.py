"""Checkpoints that cannot be written: an error on every worker, and what was complete before stays."""

import pkgutil
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from small_runs import train, trained
from world import succeed, world

from dlion import checkpoint
from dlion.errors import CheckpointError, ExchangeError

FULL = [
    ("dlion.checkpoint.stacked.Part.write", 0),
    ("dlion.checkpoint.stacked.Part.write", 1),
    ("dlion.checkpoint.stacked.Part.write_index", 0),
    ("dlion.checkpoint.manifest.Manifest.write", 0),
    ("os.replace", 0),
]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("act", "victim"), FULL)
def test_a_full_disk_leaves_the_checkpoint_of_before_and_says_so_on_every_worker(
    act: str, victim: int, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = threading.Event()
    original = pkgutil.resolve_name(act)

    def full(first: Any, *rest: Any) -> Any:
        if failing.is_set() and getattr(first, "rank", victim) == victim:
            raise OSError(28, "No space left on device", "the file")
        return original(first, *rest)

    monkeypatch.setattr(act, full)

    def work(rank: int, group: dist.ProcessGroup) -> str:
        model, optimizer = trained(2, group, rank)
        checkpoint.save(tmp_path / "good", model, optimizer)
        failing.set()
        with pytest.raises(CheckpointError) as error:
            checkpoint.save(tmp_path / "bad", model, optimizer, asynchronous=asynchronous).wait()
        train(model, optimizer, rank, range(2, 3))  # nothing else is broken
        return str(error.value)

    said = succeed(world(2, work))
    assert said[0] == said[1]
    assert f"{tmp_path / 'bad'} was not written: rank {victim}: No space left on device: the file" in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["good"] and checkpoint.latest(tmp_path) == tmp_path / "good"


def test_what_the_system_says_is_not_lost_in_torchs_writer(tmp_path: Path) -> None:
    model, optimizer = trained()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"a was not written: File too large: .*/\.a\.[0-9a-f]{8}\.tmp/__0_0\.distcp"
        ):
            checkpoint.save(tmp_path / "a", model, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_failure_that_nobody_waited_for_is_told_at_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = trained(1, group, rank)
        (tmp_path / "bad").mkdir(exist_ok=True)
        saving = checkpoint.save(tmp_path / "bad", model, optimizer, asynchronous=True)
        again = checkpoint.save(tmp_path / "good", model, optimizer, asynchronous=True)
        again.wait()
        assert saving.done and not saving.held_up > 30

    with pytest.warns(UserWarning, match="the last checkpoint failed, and nobody waited for it: .*exists already"):
        succeed(world(2, work))
    assert checkpoint.is_complete(tmp_path / "good")


@pytest.mark.slow
def test_a_worker_that_is_gone_is_named_and_leaves_the_checkpoint_of_before(tmp_path: Path) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = trained(1, group, rank)
        checkpoint.save(tmp_path / "good", model, optimizer)
        if rank != 1:
            checkpoint.save(tmp_path / "bad", model, optimizer)

    first, _, third = world(3, work, seconds=2)
    assert isinstance(first, ExchangeError) and isinstance(third, ExchangeError)
    assert checkpoint.latest(tmp_path) == tmp_path / "good" and not (tmp_path / "bad").exists()
