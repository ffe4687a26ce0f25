"""Kill a worker at a random file operation of saving, and go on from what is there: fifty times.

    python bench/kills.py [--kills 50] [--seed 1]

Two workers in processes of their own train a small model and save it after steps 2 and 4, the second time while steps 5
and 6 train. Each file operation of the second saving is counted in both; one of all of them, drawn at random, is where
its process kills itself (SIGKILL; in the middle, if it is a write). Then two new workers load the latest checkpoint and
train to step 6. A kill is survived if no damaged checkpoint has a name, the one of step 2 or 4 is found, never an older
one than a worker had been told to be complete, and parameters, momenta and counters at step 6 are to the bit those of a
run that was not killed.
"""

import argparse
import hashlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from file_operations import Operations
from torch import nn

from dlion import Distributed, checkpoint
from dlion.errors import DlionError
from dlion.ops.bits import as_bytes

WORKERS = 2
PHASES = ("before", "between", "after")  # the first write, the final rename
LONGEST = 60.0  # seconds that any process may take

Operation = tuple[int, int, str, str]  # rank, number (from 1), operation, file


@dataclass(frozen=True)
class Kill:
    """What became of a kill.

    Attributes:
        phase: "before", "between" or "after" the first write and the final rename.
        found: the step of the checkpoint that was found.
        fault: what is wrong; None when it was survived.
    """

    at: Operation
    phase: str
    found: int
    fault: str | None


def model_of() -> nn.Module:
    """Some thirty tensors, with buffers."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(7) for layer in (nn.Linear(24, 24), nn.BatchNorm1d(24))), nn.Linear(24, 5)
    )


def train(model: nn.Module, optimizer: Distributed, rank: int, steps: range) -> None:
    """Data are a function of (rank, step)."""
    for step in steps:
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        torch.autograd.backward(model(inputs).square().mean())
        optimizer.step()


def digest(model: nn.Module, optimizer: Distributed) -> str:
    """Of everything that training goes on from."""
    found = hashlib.sha256()
    momenta = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    for tensor in [*model.parameters(), *model.buffers(), *momenta]:
        found.update(as_bytes(tensor.detach().contiguous()).numpy().tobytes())
    found.update(repr((optimizer.param_groups[0]["t"], optimizer.stats.steps, optimizer.stats.bytes_sent)).encode())
    return found.hexdigest()


def saving(rank: int, folder: Path, fatal: int | None, tell: Callable[..., None]) -> None:
    """The first life: save after steps 2 and 4, train to step 6."""
    model = model_of()
    optimizer = Distributed(model.parameters(), lr=1e-3)
    train(model, optimizer, rank, range(2))
    (folder / "words.txt").write_text("a file to keep inside")
    kept = {"words.txt": folder / "words.txt"}
    checkpoint.save(folder / "saved/step-2", model, optimizer, files=kept)
    train(model, optimizer, rank, range(2, 4))
    with Operations(folder / "saved", fatal) as operations:
        under_way = checkpoint.save(folder / "saved/step-4", model, optimizer, files=kept, asynchronous=True)
        train(model, optimizer, rank, range(4, 6))
        under_way.wait()
    tell(complete=True, seen=operations.seen, digest=digest(model, optimizer))


def resuming(rank: int, folder: Path, fatal: None, tell: Callable[..., None]) -> None:
    """The second: go on to step 6."""
    model = model_of()
    optimizer = Distributed(model.parameters(), lr=5.0)
    path = checkpoint.latest(folder / "saved")
    assert path is not None, "there is no checkpoint"
    checkpoint.load(path, model, optimizer)
    train(model, optimizer, rank, range(optimizer.param_groups[0]["t"], 6))
    tell(path=path.name, digest=digest(model, optimizer))


def together(life: Callable[..., None], folder: Path, fatal: dict[int, int]) -> list[dict[str, Any]]:
    """What each worker told, {} of those that did not come so far."""
    meeting = Path(tempfile.mkdtemp(dir=folder))
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_live, args=(life, rank, folder, meeting, fatal.get(rank))) for rank in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LONGEST)
    stuck = [worker for worker in workers if worker.is_alive()]
    for worker in stuck:
        worker.kill()
        worker.join()
    told = [meeting / f"told-{rank}" for rank in range(WORKERS)]
    found = [json.loads(path.read_text()) if path.exists() else {} for path in told]
    return found if not stuck else [{"stuck": True}] * WORKERS


def _live(life: Callable[..., None], rank: int, folder: Path, meeting: Path, fatal: int | None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")

    def tell(**said: Any) -> None:
        (meeting / f"told-{rank}").write_text(json.dumps(said))

    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=WORKERS)
    try:
        life(rank, folder, fatal, tell)
    except DlionError as error:
        tell(error=str(error))
    except Exception as error:
        tell(fault=f"{type(error).__name__}: {error}")
    else:
        dist.destroy_process_group()


def phase_of(at: Operation, operations: list[Operation]) -> str:
    """Where in a saving an operation lies. The first write and the final rename are those of worker 0."""
    rank, number, _, _ = at
    own = [operation for operation in operations if operation[0] == rank]
    first = min(n for _, n, operation, _ in own if operation == "write")
    if number < first:
        return "before"
    last = max((n for _, n, operation, name in own if operation == "replace"), default=len(own) + 1)
    return "between" if number <= last else "after"


def kill(at: Operation, phase: str, whole: list[dict[str, Any]], folder: Path) -> Kill:
    """Kill a worker there, and let two others go on."""
    rank, number, _, _ = at
    told = together(saving, folder, {rank: number})
    heard = any(said.get("complete") for said in told)
    names = [path for path in (folder / "saved").iterdir() if not path.name.startswith(".")]
    broken = [path.name for path in names if not checkpoint.is_complete(path)]
    ended = together(resuming, folder, {})
    found = {int(said["path"].removeprefix("step-")) for said in ended if "path" in said}
    step = max(found, default=0)
    expected = 4 if phase == "after" else 2
    faults = [
        *[f"{said}" for said in (*told, *ended) if "fault" in said or "stuck" in said],
        *[f"{name} is damaged and has a name" for name in broken],
        *(["nobody was killed"] if told[rank] else []),
        *([f"step {step} was found and not {expected}"] if found != {expected} else []),
        *(["a checkpoint that was complete is lost"] if heard and step < 4 else []),
        *(["the bits are others"] if [s.get("digest") for s in ended] != [s["digest"] for s in whole] else []),
    ]
    return Kill(at, phase, step, "; ".join(faults) or None)


def table(kills: list[Kill], operations: list[Operation]) -> str:
    """What became of them, by operation and phase."""
    rows = [
        "| killed at | phase | kills | went on from the new one | from the one before | lost |",
        "|---|---|---|---|---|---|",
    ]
    groups = Counter((each.phase, each.at[2]) for each in kills)
    for (phase, operation), count in sorted(groups.items(), key=lambda item: (PHASES.index(item[0][0]), item)):
        found = [each for each in kills if (each.phase, each.at[2]) == (phase, operation)]
        new, old = (sum(each.fault is None and each.found == step for each in found) for step in (4, 2))
        rows.append(f"| {operation} | {phase} | {count} | {new} | {old} | {count - new - old} |")
    survived = sum(each.fault is None for each in kills)
    between = sum(each.phase == "between" for each in kills)
    counted = " + ".join(str(sum(each[0] == rank for each in operations)) for rank in range(WORKERS))
    rows += [
        "",
        f"{len(kills)} kills at {counted} operations of {WORKERS} workers, {between} of them between the first write "
        f"and the final rename: {survived} resumable to the bit, {len(kills) - survived} lost",
    ]
    return "\n".join(rows)


def run(count: int, seed: int) -> tuple[list[Kill], list[Operation]]:
    """Kill `count` times: at each kind of operation on each file of each worker as often, as near as chance has it."""
    # torch imports more at its first optimizer: once, and not in every fork
    Distributed([nn.Parameter(torch.zeros(1))])
    with tempfile.TemporaryDirectory(prefix="dlion-kills-") as scratch:
        (folder := Path(scratch) / "whole").mkdir()
        whole = together(saving, folder, {})
        assert all("seen" in said for said in whole), whole
        operations = [
            (rank, number, operation, name)
            for rank, said in enumerate(whole)
            for number, (operation, name) in enumerate(said["seen"], 1)
        ]
        draws = random.Random(seed)
        kinds = sorted({(rank, operation, name) for rank, _, operation, name in operations})
        kills: list[Kill] = []
        for index in range(count):
            kind = draws.choice(kinds)  # most operations are writes of a few bytes
            at = draws.choice([each for each in operations if (each[0], *each[2:]) == kind])
            (folder := Path(scratch) / str(index)).mkdir()
            kills.append(kill(at, phase_of(at, operations), whole, folder))
            print(
                f"{index + 1:3} worker {at[0]}, operation {at[1]:2}: {at[2]:7} {at[3]:20} {kills[-1].phase:8}", end=""
            )
            print(f"step {kills[-1].found}, {kills[-1].fault or 'equal to the bit'}", flush=True)
    return kills, operations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    kills, operations = run(asked.kills, asked.seed)
    print(f"\n{table(kills, operations)} ({time.monotonic() - started:.0f} s)")
    return 1 if any(each.fault for each in kills) else 0


if __name__ == "__main__":
    sys.exit(main())
