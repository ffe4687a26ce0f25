"""Guards what happens to processes: Ctrl-C, SIGTERM, a rank that dies, torchrun; nobody is left behind."""

import json
import multiprocessing
import os
import select
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from command import TINY, await_step, await_text, children, dlion, records, start

from dlion.errors import ExchangeError
from dlion.train import local_ranks
from dlion.train.ranks import StopSign, only_lost_contact

LONG = ["train", *TINY, "--steps", "100000", "--eval-every", "100000", "--out", ".", "--name", "run"]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "whole_group"),
    [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)],
    ids=["Ctrl-C in a terminal", "SIGINT to the command", "SIGTERM to the command", "SIGTERM to all, as by timeout"],
)
def test_a_signal_ends_training_after_a_checkpoint(number: int, whole_group: bool, tmp_path: Path) -> None:
    process = start(LONG, tmp_path)
    await_step(process, 3)
    ranks = children(process)
    assert len(ranks) == 2
    (os.killpg if whole_group else os.kill)(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert errors == ""
    assert not alive(ranks)
    step = records(tmp_path / "run")[-1]["step"] + 1
    assert f"stopped after step {step}; go on with: dlion train --resume run" in output
    manifest = json.loads((tmp_path / f"run/checkpoints/step-{step:08d}/manifest.json").read_text())
    assert manifest["notes"]["progress"]["step"] == step
    assert not (tmp_path / "run/summary.json").exists()
    if whole_group:
        lengthened, _ = dlion(["train", "--resume", "run", "--steps", str(step + 2)], tmp_path)
        assert "done: validation loss" in lengthened
        assert [line["step"] for line in records(tmp_path / "run")] == list(range(step + 3))


@pytest.mark.processes
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_named(rank: int, tmp_path: Path) -> None:
    process = start(LONG, tmp_path)
    await_step(process, 2)
    ranks = children(process)
    os.kill(ranks[rank], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.count("\n") == 1
    assert f"rank {rank} failed: it was ended by SIGKILL" in errors
    assert not alive(ranks)
    assert (tmp_path / "run/failure.log").read_text().startswith(f"rank {rank}: ")


@pytest.mark.processes
def test_a_run_folder_that_vanishes_is_said(tmp_path: Path) -> None:
    process = start(LONG, tmp_path)
    await_step(process, 2)
    (tmp_path / "run").rename(tmp_path / "moved")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.count("\n") == 1 and "rank 0 failed: FileNotFoundError" in errors
    assert "failure.log could not be written" in errors


@pytest.mark.processes
def test_ranks_do_not_outlive_their_launcher(tmp_path: Path) -> None:
    process = start(LONG, tmp_path)
    await_step(process, 2)
    watched = [os.pidfd_open(pid) for pid in children(process)]
    process.kill()
    process.communicate(timeout=30)
    for descriptor in watched:
        assert select.select([descriptor], [], [], 30)[0], "a rank is still running"
        os.close(descriptor)


@pytest.mark.processes
def test_torchrun_starts_the_same_program(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dlion")
    flags = ["train", *TINY[2:], "--steps", "3", "--out", ".", "--name"]
    process = start([*flags, "found"], tmp_path, torchrun)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert output.count("run folder: found") == 1
    dlion([*flags, "own", "--workers", "2"], tmp_path)
    assert records(tmp_path / "found") == records(tmp_path / "own")
    assert json.loads((tmp_path / "found/summary.json").read_text())["workers"] == 2


def test_all_ranks_stop_after_the_same_step() -> None:
    store = dist.HashStore()
    signalled = {"a": 0, "b": 0}
    a = StopSign(store, lambda: signalled["a"])
    b = StopSign(store, lambda: signalled["b"])
    assert not a.reached(7) and not b.reached(7)
    signalled["b"] = signal.SIGINT
    # a asks first after step 8, b is signalled and announces: both end after step 9.
    assert not a.reached(8) and not b.reached(8)
    assert a.reached(9) and b.reached(9)
    assert a.signal == b.signal == signal.SIGINT


def test_a_rank_that_only_lost_contact_is_told_from_the_one_that_failed() -> None:
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert only_lost_contact(gloo) and only_lost_contact(ExchangeError("lost"))
    assert not only_lost_contact(RuntimeError("shapes differ")) and not only_lost_contact(ValueError("gloo"))


def test_a_rank_that_is_signalled_before_the_launcher_is_no_second_signal() -> None:
    """Then the launcher's first signal was taken for a repeated one, and ended the run at once with 130."""
    signalled = multiprocessing.Value("i", signal.SIGTERM, lock=False)
    handle = local_ranks._remember(signalled, os.getpid())
    handle(signal.SIGTERM, None)
    handle(signal.SIGTERM, None)
    assert signalled.value == signal.SIGTERM


@pytest.mark.processes
def test_a_command_that_hangs_says_where(tmp_path: Path) -> None:
    """Of these tests themselves, as in tests/test_processes.py."""
    process = start([], tmp_path, module=("-c", "import threading; threading.Event().wait()"))
    with pytest.raises(AssertionError, match=r"ended without 'a word': Fatal Python error: Aborted\n(.*\n)*.* in wait"):
        await_text(process, "a word", seconds=2)
    process.communicate()
