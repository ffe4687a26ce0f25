"""Scripts as torchrun starts them, in processes that have imported torch, and whatever a test asks for, already."""

import io
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from processes import launch
from ranks import told

PRELOADED = ("torch._dynamo", "dlion.integrations.accelerate", "dlion.integrations.transformers", "peft", "language")


@dataclass(frozen=True)
class Said:
    """What one process of a script printed, and was warned of."""

    printed: list[str]
    warned: list[str]


def run(script: Path, folder: Path, *flags: str, size: int = 2, preload: Sequence[str] = PRELOADED) -> list[Said]:
    """Run `script` in `folder`, in `size` processes."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("port*"):
        old.unlink()
    results = launch(folder, size, partial(_as_torchrun, script=script, flags=flags), seconds=110, preload=preload)
    assert all(isinstance(result, list) for result in results), results
    return [Said(*result) for result in results]


def _as_torchrun(rank: int, size: int, folder: Path, script: Path, flags: Sequence[str]) -> Any:
    place = dist.FileStore(str(folder / "port"), size)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
        place.set("port", str(store.port))
    port = place.get("port").decode()
    known = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    known |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in known.items()}
    os.chdir(folder)
    sys.argv = [str(script), *flags]
    sys.path.insert(0, str(script.parent))
    warned: list[str] = []
    with redirect_stdout(io.StringIO()) as printed, told(warned):
        runpy.run_path(str(script), run_name="__main__")
    return [printed.getvalue().splitlines(), warned]
