"""Accelerate with two real ranks: local gradients, bytes, checkpoints of all momenta, and what is reported."""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from processes import launch
from ranks import bytes_sent, gradients, held, meet_as_launched, refusal, told
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scripts
from dlion import DistributedLion
from dlion.integrations.accelerate import local_gradients

pytestmark = pytest.mark.timeout(240)  # with frameworks to import, and other work on the machine
STEPS, SAVED = 6, 3
VALUES = 6  # parameters of the model


class Run:
    """A model with buffers, prepared by Accelerate; each rank begins with other parameters and has other data."""

    def __init__(self, accelerator: Accelerator, rank: int, **options: Any) -> None:
        torch.manual_seed(rank)
        self.bare = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.BatchNorm1d(70), nn.Linear(70, 3))
        self.optimizer = DistributedLion(self.bare.parameters(), lr=0.01, topology="sharded", **options)
        self.accelerator, self.rank = accelerator, rank
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.model, self.prepared, self.scheduler = accelerator.prepare(self.bare, self.optimizer, scheduler)

    def steps(self, first: int, last: int) -> list[list[float]]:
        seen = []
        for step in range(first, last):
            for micro in range(2):
                with self.accelerator.accumulate(self.model):
                    noise = torch.Generator().manual_seed(100 * step + 10 * micro + self.rank)
                    loss = self.model(torch.randn(4, 5, generator=noise)).square().mean()
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                        seen.append(gradients(self.bare))
                    self.prepared.step()
                    self.scheduler.step()
                    self.prepared.zero_grad()
        return seen


def accelerator(*handlers: Any) -> Accelerator:
    return Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=list(handlers))


def work(rank: int, size: int, folder: Path) -> dict[str, Any]:
    meet_as_launched(folder, rank, size)
    result: dict[str, Any] = {"said": []}
    asked = DistributedDataParallelKwargs(find_unused_parameters=True)
    whole = Run(local_gradients(local_gradients(accelerator(asked))), rank)
    assert isinstance(whole.model, DistributedDataParallel) and whole.model.find_unused_parameters
    with told(result["said"]):
        result["gradients"] = whole.steps(0, SAVED)
        whole.accelerator.save_state(str(folder / "state"))
        result["gradients"] += whole.steps(SAVED, STEPS)
    result["bytes"] = [whole.optimizer.stats.bytes_sent, STEPS * bytes_sent(whole.bare.parameters(), size)]
    result["whole"] = held(whole.bare, whole.optimizer)

    whole.accelerator.save_state(str(folder / "kept"))

    again = Run(local_gradients(accelerator()), rank)
    again.accelerator.load_state(str(folder / "state"))
    again.steps(SAVED, STEPS)
    result["again"] = held(again.bare, again.optimizer)

    whole.accelerator.save_state(str(folder / "state"))  # over the one of before
    later = Run(local_gradients(accelerator()), rank)
    later.accelerator.load_state(str(folder / "state"))
    result["later"] = held(later.bare, later.optimizer)
    return result | reported(rank, folder)


def reported(rank: int, folder: Path) -> dict[str, Any]:
    """What Accelerate's users do wrong."""
    averaging: list[str] = []
    wrong = Run(accelerator(), rank)
    with told(averaging):
        seen = wrong.steps(0, 4)

    incomplete: list[str] = []
    wrong.accelerator.wait_for_everyone()
    if rank == 0:
        shutil.rmtree(folder / "state" / "dlion")
    wrong.accelerator.wait_for_everyone()
    lost = Run(local_gradients(accelerator()), rank)
    with told(incomplete):
        lost.accelerator.load_state(str(folder / "state"))

    hooked = accelerator(DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16))
    apart = local_gradients(accelerator())
    unseen = accelerator()
    os.environ["WORLD_SIZE"] = "4"  # than it has found
    refused = [
        refusal(lambda: local_gradients(unseen)),
    ]
    os.environ["WORLD_SIZE"] = "2"
    refused += [
        refusal(lambda: local_gradients(hooked)),
        refusal(lambda: local_gradients(wrong.accelerator)),
        refusal(lambda: apart.prepare(torch.optim.AdamW(lost.bare.parameters()))),
    ]
    return {"averaging": averaging, "averaged": seen, "incomplete": incomplete, "refused": refused}


def alone(rank: int, size: int, folder: Path) -> list[list[float]]:
    """One process, without a process group, goes on from the checkpoint of two."""
    run = Run(local_gradients(accelerator()), rank)
    run.accelerator.load_state(str(folder / "kept"))
    return held(run.bare, run.optimizer)


def unprepared(rank: int, size: int, folder: Path) -> list[str]:
    """What is warned of where `prepare` was given a model alone."""
    outer = local_gradients(accelerator())
    model = nn.Linear(2, 2)
    DistributedLion(model.parameters(), lr=0.1)
    outer.prepare(model)
    said = []
    for call in (outer.save_state, outer.load_state):
        with pytest.warns(UserWarning, match="accelerator.prepare was given no optimizer") as caught:
            call(str(folder / "state"))
        said.append(str(caught[0].message))
    return [next(part for part in ("keeps nobody's", "nobody's") if part in text) for text in said]


def failing(rank: int, size: int, folder: Path) -> list[float]:
    """Accelerate's own file of the optimizer is missing, so `load_state` fails; what the caller then loads counts."""
    run = Run(local_gradients(accelerator()), rank)
    run.steps(0, 1)
    run.accelerator.save_state(str(folder / "incomplete"))
    (folder / "incomplete" / "optimizer.bin").unlink()
    with pytest.raises(FileNotFoundError):
        run.accelerator.load_state(str(folder / "incomplete"))
    mine = copy.deepcopy(run.optimizer.state_dict())
    mine["param_groups"][0]["lr"] = 0.5
    run.optimizer.load_state_dict(mine)
    return [run.optimizer.param_groups[0]["lr"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return launch(folder, 2, work, seconds=100, preload=scripts.PRELOADED)


def test_gradients_stay_local_and_parameters_equal(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert len(first["gradients"]) == STEPS
    assert all(a != b for a, b in zip(first["gradients"], second["gradients"], strict=True))
    assert first["whole"][:VALUES] == second["whole"][:VALUES]
    assert first["whole"][-VALUES:] != second["whole"][-VALUES:]  # momenta are each worker's own
    assert not first["said"] and not second["said"]


def test_bytes_are_those_of_the_formula(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        sent, expected = rank["bytes"]
        assert sent == expected


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["again"] == rank["whole"]


def test_a_checkpoint_may_be_written_over_another(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["later"][:VALUES] == ranks[0]["whole"][:VALUES] == ranks[1]["later"][:VALUES]
    for rank in ranks:
        assert rank["later"][-VALUES:] == rank["whole"][-VALUES:]


def test_another_number_of_workers_goes_on_from_the_mean(ranks: list[dict[str, Any]], folder: Path) -> None:
    (found,) = launch(folder, 1, alone, seconds=60, preload=scripts.PRELOADED)
    assert found[:VALUES] == ranks[0]["whole"][:VALUES]
    for mean, *momenta in zip(found[-VALUES:], *(rank["whole"][-VALUES:] for rank in ranks), strict=True):
        expected = torch.tensor(momenta).mean(0)  # of float32, as the saved ones are
        assert torch.equal(torch.tensor(mean), expected)


def test_a_state_that_is_loaded_after_a_failure_counts(tmp_path: Path) -> None:
    assert launch(tmp_path, 1, failing, seconds=60, preload=scripts.PRELOADED) == [[0.5]]


def test_what_is_set_up_wrongly_is_reported(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["averaged"] == ranks[1]["averaged"]
    for rank in ranks:
        assert any("averaged already" in said and "local_gradients(accelerator)" in said for said in rank["averaging"])
        assert [text for text in rank["incomplete"] if "is missing" in text and "momentum of worker 0" in text]
        unseen, hooked, late, apart = rank["refused"]
        assert "WORLD_SIZE=4" in unseen and "cpu=True" in unseen
        assert "comm_hook='fp16' averages gradients" in hooked and "before accelerator.prepare(model)" in late
        assert "AdamW" in apart and "train apart" in apart


def test_a_state_without_an_optimizer_says_that_no_momentum_is_kept(tmp_path: Path) -> None:
    assert launch(tmp_path, 1, unprepared, seconds=60, preload=scripts.PRELOADED) == [["keeps nobody's", "nobody's"]]
