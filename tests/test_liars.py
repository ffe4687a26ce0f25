"""Real workers that lie: over Gloo they do what the simulator says, and nothing they send is unpickled."""

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from liars import MISCOUNTING, Plot, corrupted
from source_reader import Source
from test_faults import Small, equal, noise, simulate, small_buckets
from torch import Tensor
from world import succeed, world

from dlion import Distributed
from dlion.errors import AgreementError
from dlion.methods import METHODS
from dlion.simulate import Fault

ROOT = Path(__file__).resolve().parent.parent
WORKERS, LIARS, STEPS = 7, 3, 3


def real(act: str | None, loud: float = 1.0, method: str = "dlion-mavo", **options: Any) -> list[list[Tensor]]:
    """Every worker's parameters after some steps in which the lowest ranks lie; the gradients of rank 0 are `loud`."""
    plot = Plot(act, range(LIARS) if act else (), range(LIARS, WORKERS))

    def work(rank: int, group: Any) -> list[Tensor]:
        plot.me.rank = rank
        model = Small()
        optimizer = Distributed(model.parameters(), process_group=group, lr=0.01, **small_buckets(method, **options))
        for step in range(STEPS):
            for param in model.parameters():
                param.grad = noise(rank, step, param) * (loud if rank == 0 else 1.0)
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, method, corrupted(METHODS[method], plot))
        return list(succeed(world(WORKERS, work)))


@pytest.mark.wide(4)
@pytest.mark.parametrize("topology", ["sharded", "replicated"])
@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg"])
@pytest.mark.parametrize("act", ["inverted", "random", "colluding"])
def test_real_liars_do_what_simulated_ones_do(act: str, method: str, topology: str) -> None:
    found = real(act, method=method, topology=topology)
    simulated, _ = simulate(noise, STEPS, workers=WORKERS, method=method, faults=[Fault(act, range(LIARS))])
    assert all(equal(one, simulated) for one in found)
    assert not equal(simulated, simulate(noise, STEPS, workers=WORKERS, method=method)[0])


@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg"])
def test_whoever_shouts_has_one_vote(method: str) -> None:
    """Gradients a thousand times as large change nothing: one vote for each parameter is all that a worker has."""
    assert equal(real(None, loud=1024.0, method=method)[0], real(None, method=method)[0])
    assert not equal(simulate(noise, STEPS, method="g-lion")[0], simulate(shouted, STEPS, method="g-lion")[0])


@pytest.mark.parametrize("method", ["dlion-mavo", "dlion-avg"])
def test_the_owner_of_a_shard_can_lie_about_it_and_who_counts_for_itself_cannot(method: str) -> None:
    """As docs/robustness.md says: replicated ballots leave a liar nobody to deceive but itself."""
    told, _ = simulate(noise, STEPS, workers=WORKERS, method=method)
    sharded = real(MISCOUNTING, method=method, topology="sharded")
    assert all(equal(one, sharded[0]) for one in sharded) and not equal(sharded[0], told)
    moves = [(a - b).abs().max() for a, b in zip(sharded[0], Small().parameters(), strict=True)]
    assert max(moves) <= STEPS * 0.01 + 1e-6  # and even then a parameter moves by lr at most
    replicated = real(MISCOUNTING, method=method, topology="replicated")
    assert all(equal(one, told) for one in replicated[LIARS:])
    assert not equal(replicated[0], told)


def shouted(rank: int, step: int, param: Tensor) -> Tensor:
    return noise(rank, step, param) * (1024.0 if rank == 0 else 1.0)


# ---- nothing of dlion's own protocol unpickles

UNPICKLING = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
OBJECTS = ("_object", "_object_list", "_objects")
# What reads files, and not what another worker says: torch.load(weights_only=True) of a checkpoint that was verified,
# and a CIFAR batch without running anything that is in it.
FILES = {
    "dlion/checkpoint/holdings.py",
    "dlion/checkpoint/stacked.py",
    "dlion/train/data/inert_pickle.py",
}


def unpickles(source: Source) -> list[str]:
    """Where a source could run what it is sent."""
    found = []
    for node, _, dotted in source.imports:
        if dotted.partition(".")[0] in UNPICKLING:
            found.append(source.at(node, f"imports {dotted}"))
    for node, dotted in source.uses:
        part = dotted.rpartition(".")[2]
        if dotted in ("torch.load", "torch.serialization.load"):
            found.append(source.at(node, f"uses {dotted}"))
        if dotted.startswith("torch.distributed") and part.endswith(OBJECTS):
            found.append(source.at(node, f"uses {dotted}"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found.append(source.at(node, f"calls {node.func.id}"))
    return found


def test_no_source_unpickles_what_a_worker_says() -> None:
    paths = sorted((ROOT / "dlion").rglob("*.py"))
    sources = [Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]
    found = [fault for source in sources if source.path not in FILES for fault in unpickles(source)]
    assert not found, "\n".join(found)
    assert all(unpickles(source) for source in sources if source.path in FILES)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from _pickle import loads",
        "import torch\ntorch.load(path)",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "import torch.distributed as dist\ndist.recv_object_list(a)",
        "eval(text)",
    ],
)
def test_a_source_that_unpickles_is_found(text: str) -> None:
    assert unpickles(Source("dlion/optim.py", text))


def test_no_step_and_no_diagnosis_unpickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreement, exchange, guard and a diagnosis among real workers, with unpickling forbidden."""

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    Distributed(Small().parameters())  # the first optimizer makes torch import files with unpicklers of their own
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)

    def work(rank: int, group: Any) -> str:
        model = Small()
        optimizer = Distributed(model.parameters(), process_group=group, **small_buckets(lr=0.01))
        for step in range(4):
            for param in model.parameters():
                param.grad = noise(rank, step, param)
            if step == 3 and rank == 1:
                optimizer.param_groups[0]["lr"] = 0.5
            try:
                optimizer.step()
            except AgreementError as error:
                return f"{step}: {error}"
        return "no error"

    told = succeed(world(3, work))
    assert all(one.startswith("3: ") and "on rank 1 group 0 has lr=0.5 instead of 0.01" in one for one in told), told
