"""Two torchrun launchers train one plain loop together, as two machines do: examples/with_torchrun.py as it stands."""

import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.run as torchrun
from processes import launch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples/with_torchrun.py"
STEPS, SAVED = 6, 3
FLAGS = ("--steps", str(STEPS), "--save-every", str(SAVED))
# six processes import torch, and there is other work on the machine
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


class Trained(NamedTuple):
    ranks: list[dict[str, Any]]
    printed: list[str]


def free_port() -> int:
    """One that no process asks for by chance: those of the system's own choice are higher."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no port is free")


def machine(node: int, size: int, folder: Path, port: int, script: Path, flags: Sequence[str]) -> str:
    """What torchrun's launcher of one machine does, and its one rank; what they print."""
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.chdir(folder)
    printed = folder / f"printed-{node}.txt"
    os.dup2(os.open(printed, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), sys.stdout.fileno())
    meeting = ["--nnodes", str(size), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    watched = [str(ROOT / "tests/watched.py"), str(folder), str(script)]
    torchrun.main([*meeting, "--node-rank", str(node), *watched, *flags])
    return printed.read_text()


def train(folder: Path, script: Path, *flags: str) -> Trained:
    """Run `script` under two launchers; what each rank saw, and what each machine printed."""
    folder.mkdir(exist_ok=True)
    started = partial(machine, port=free_port(), script=script, flags=flags)
    printed = launch(folder, 2, started, seconds=110, preload=("torch.distributed.run",))
    assert all(isinstance(text, str) for text in printed), printed
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return Trained(ranks, printed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, EXAMPLE, *FLAGS)


def test_both_machines_take_part(whole: tuple[Path, Trained]) -> None:
    host = socket.gethostname()
    first, second = whole[1].printed
    assert first.splitlines()[0] == f"worker 0 of 2 on {host}" and "step 6: loss" in first
    assert second == f"worker 1 of 2 on {host}\n"
    assert len(EXAMPLE.read_text().splitlines()) < 60


def test_gradients_are_each_machines_own_and_parameters_equal(whole: tuple[Path, Trained]) -> None:
    first, second = whole[1].ranks
    assert len(first["gradients"]) == STEPS
    assert all(a != b for a, b in zip(first["gradients"], second["gradients"], strict=True))
    assert first["momenta"] != second["momenta"] and first["parameters"] == second["parameters"]
    assert not first["warned"] and not second["warned"]


def test_bytes_are_those_of_the_formula(whole: tuple[Path, Trained]) -> None:
    for rank in whole[1].ranks:
        words = sum(-(-size // 64) for size in rank["sizes"])
        assert rank["bytes"] == STEPS * (16 + 8 * words)  # two workers send each other whole ballots: docs/methods.md


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(whole: tuple[Path, Trained], tmp_path: Path) -> None:
    folder, uninterrupted = whole
    shutil.copytree(folder / "torchrun-checkpoints" / str(SAVED), tmp_path / "torchrun-checkpoints" / str(SAVED))
    again = train(tmp_path, EXAMPLE, *FLAGS)
    for number, rank in enumerate(again.ranks):
        assert f"worker {number} goes on from step {SAVED}" in again.printed[number]
        for what in ("parameters", "momenta", "steps", "bytes"):
            assert rank[what] == uninterrupted.ranks[number][what]
        assert rank["gradients"] == uninterrupted.ranks[number]["gradients"][SAVED:]


def test_averaging_left_on_is_reported(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    wrong = text.replace("dlion.local_gradients(model)", "nn.parallel.DistributedDataParallel(model)")
    assert wrong != text
    script = tmp_path / "averaging.py"
    script.write_text(wrong)
    first, second = train(tmp_path, script, *FLAGS, "--save-every", "100").ranks
    assert first["gradients"] == second["gradients"]
    for rank in (first, second):
        assert len([text for text in rank["warned"] if "averaged already" in text and "local_gradients" in text]) == 1
