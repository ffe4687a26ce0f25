"""Guards the Python in the documentation: every block is run, here or in the test that is named for it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dlion

ROOT = Path(__file__).resolve().parent.parent

# Page -> the test that runs its blocks and looks at what comes out.
ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "docs/add-a-method.md": "tests/test_add_a_method.py",
    "docs/command.md": "tests/test_readme.py",
    "docs/elastic.md": "tests/test_elastic_script.py",
    "docs/integrations/accelerate.md": "tests/integrations/test_pages.py",
    "docs/integrations/fsdp2.md": "tests/integrations/test_pages.py",
    "docs/integrations/lightning.md": "tests/integrations/test_pages.py",
    "docs/integrations/transformers.md": "tests/integrations/test_pages.py",
    "docs/migration.md": "tests/test_migration.py",
    "docs/simulator.md": "tests/test_readme.py",
}
# (page, number among its Python blocks) -> why nothing runs it.
NOT_RUN = {
    ("docs/odd-gradients.md", 0): "it needs a GPU; tests/test_scaling.py does the same on a CPU",
    ("docs/gpu.md", 0): "it needs GPUs; the block of docs/own-loop.md does the same on CPUs",
    ("docs/gpu.md", 1): "it needs a GPU; bench/gpu_checks.py does the same on one",
}


def blocks() -> dict[tuple[str, int], pages.Block]:
    """Every Python block of the documentation, by page and number."""
    found = {}
    for page in pages.documents():
        code = [block for block in pages.blocks(page.read_text(encoding="utf-8")) if block.language == "python"]
        found |= {(page.relative_to(ROOT).as_posix(), number): block for number, block in enumerate(code)}
    return found


BLOCKS = blocks()
HERE = [key for key in BLOCKS if key[0] not in ELSEWHERE and key not in NOT_RUN]
SCRIPTS = [key for key in HERE if BLOCKS[key].mark == "torchrun" and key[0] != "docs/checkpoints.md"]


def loss_of(outputs: Any, targets: Any) -> torch.Tensor:
    loss: torch.Tensor = (outputs - targets).square().mean()
    return loss


def a_model(folder: Path) -> dict[str, Any]:
    return {"dlion": dlion, "model": nn.Linear(4, 2)}


def a_checkpoint_of_four(folder: Path) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(5, 70))
    simulation = dlion.Simulation(model, workers=4)
    for rank in range(4):
        with simulation.worker(rank):
            model(torch.randn(3, 5)).sum().backward()
    simulation.step()
    dlion.checkpoint.save(folder / "saved", model, simulation)
    return {"torch": torch, "path": folder / "saved"}


def simulated_scalers(folder: Path) -> dict[str, Any]:
    model = nn.Linear(4, 2)
    return {
        "simulation": dlion.Simulation(model, workers=3),
        "scalers": [torch.amp.GradScaler("cpu") for _ in range(3)],
        "model": model,
        "loss_of": lambda model, batch: model(batch).square().mean(),
        "batch_of": lambda rank: torch.randn(8, 4),
    }


def uneven_data(folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    model = dlion.local_gradients(nn.parallel.DistributedDataParallel(nn.Linear(4, 2)))
    optimizer = dlion.DistributedLion(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "batches": [(torch.randn(8, 4), torch.randn(8, 2))] * 3,
        "loss_of": loss_of,
    }


# What stands around a block that is a part of something, and what it must have done.
AROUND: dict[tuple[str, int], tuple[Callable[[Path], dict[str, Any]], Callable[[dict[str, Any]], bool]]] = {
    ("docs/agreement.md", 0): (a_model, lambda names: names["optimizer"].options.verify_every == 100),
    ("docs/agreement.md", 1): (a_model, lambda names: names["simulation"].workers == 7),
    ("docs/checkpoints.md", 1): (
        a_checkpoint_of_four,
        lambda names: bool(names["momenta"]["own/exp_avg/0.weight"].any()),
    ),
    ("docs/odd-gradients.md", 1): (
        simulated_scalers,
        lambda names: names["simulation"].stats.steps == 1,
    ),
    ("docs/odd-gradients.md", 2): (uneven_data, lambda names: names["optimizer"].param_groups[0]["t"] == 3),
}


def test_every_block_has_somebody_who_runs_it() -> None:
    assert len(BLOCKS) > 20
    assert {*NOT_RUN, *AROUND} <= set(BLOCKS) and set(ELSEWHERE) <= {page for page, _ in BLOCKS}
    for page, test in ELSEWHERE.items():
        name = Path(page).stem if "integrations" in test else page
        assert name in (ROOT / test).read_text(encoding="utf-8").replace('" / "', "/")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's, even with no_dist=True
@pytest.mark.parametrize("key", [key for key in HERE if BLOCKS[key].mark is None and key != ("docs/checkpoints.md", 0)])
def test_the_block_runs_as_it_stands(key: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    around, done = AROUND.get(key, (lambda folder: {}, lambda names: True))
    try:
        names = around(tmp_path)
        exec(compile(BLOCKS[key].code, f"{key[0]}, block {key[1]}", "exec"), names)
        assert done(names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("key", SCRIPTS)
def test_the_script_runs_under_torchrun(key: tuple[str, int], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BLOCKS[key].code)
    launcher = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*launcher, "script.py"], cwd=tmp_path, env=here, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [line for line in done.stderr.splitlines() if "Warning" in line and "dlion" in line]
