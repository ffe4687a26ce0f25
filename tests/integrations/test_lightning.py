"""Lightning with two real ranks: local gradients, bytes, checkpoints of all momenta, and what is reported."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from processes import launch
from ranks import bytes_sent, gradients, held, meet_as_launched, refusal, told
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dlion import DistributedLion
from dlion.checkpoint import is_complete
from dlion.integrations.lightning import VotingStrategy

pytestmark = pytest.mark.timeout(240)  # with frameworks to import, and other work on the machine
PRELOADED = ("torch._dynamo", "dlion.integrations.lightning")
STEPS, SAVED = 6, 3
VALUES = 6  # parameters of the model
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(LightningModule):
    """A model with buffers; each rank begins with other parameters and has other data."""

    def __init__(self, rank: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.bare = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.BatchNorm1d(70), nn.Linear(70, 3))
        self.number, self.options = rank, options
        self.seen: list[list[float]] = []
        self.buffers_at_validation: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        noise = torch.Generator().manual_seed(100 * self.global_step + self.number)
        return self.bare(torch.randn(4, 5, generator=noise)).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(gradients(self.bare))

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.buffers_at_validation = self.bare[2].running_mean.tolist()

    def configure_optimizers(self) -> Any:
        self.votes = DistributedLion(self.bare.parameters(), lr=0.01, topology="sharded", **self.options)
        return {"optimizer": self.votes, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(self.votes, 0.9)}


class WithAdamW(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.bare.parameters())


def fit(module: Module, folder: Path, steps: int, strategy: DDPStrategy, path: Path | None = None) -> None:
    """Train to `steps`, with a checkpoint after each three."""
    keeper = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, callbacks=[keeper], **QUIET,
        gradient_clip_val=1.0, num_sanity_val_steps=0, val_check_interval=2,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.zeros(40)))
    trainer.fit(module, loader, DataLoader(TensorDataset(torch.zeros(2))), ckpt_path=path)


def work(rank: int, size: int, folder: Path) -> dict[str, Any]:
    meet_as_launched(folder, rank, size)
    result: dict[str, Any] = {"said": [], "averaging": [], "incomplete": []}
    whole = Module(rank)
    with told(result["said"]):
        fit(whole, folder / "whole", STEPS, VotingStrategy())
    result |= {
        "validated": whole.buffers_at_validation,
        "gradients": whole.seen,
        "whole": held(whole.bare, whole.votes),
    }
    result["bytes"] = [whole.votes.stats.bytes_sent, STEPS * bytes_sent(whole.bare.parameters(), size)]

    again = Module(rank)
    fit(again, folder / "again", STEPS, VotingStrategy(), folder / "whole/step=3.ckpt")
    result["again"] = held(again.bare, again.votes)

    with told(result["averaging"]):
        averaged = Module(rank)
        fit(averaged, folder / "averaged", 4, DDPStrategy())
    result["averaged"] = averaged.seen

    if rank == 0:
        shutil.rmtree(folder / "whole/step=3.ckpt.dlion")
    torch.distributed.barrier()
    with told(result["incomplete"]):
        fit(Module(rank), folder / "incomplete", 4, VotingStrategy(), folder / "whole/step=3.ckpt")
    result["refused"] = refusal(lambda: fit(WithAdamW(rank), folder / "apart", 1, VotingStrategy()))
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return launch(folder, 2, work, seconds=200, preload=PRELOADED)


def test_gradients_stay_local_and_parameters_equal(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert len(first["gradients"]) == STEPS
    assert all(a != b for a, b in zip(first["gradients"], second["gradients"], strict=True))
    assert first["whole"][:VALUES] == second["whole"][:VALUES]
    assert first["whole"][-VALUES:] != second["whole"][-VALUES:]  # momenta are each worker's own
    assert not [text for rank in ranks for text in rank["said"] if "dlion" in text]


def test_bytes_are_those_of_the_formula(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        sent, expected = rank["bytes"]
        assert sent == expected


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["again"][:VALUES] == rank["whole"][:VALUES]
        assert rank["again"][-VALUES:] == rank["whole"][-VALUES:]


def test_every_checkpoint_has_all_momenta_beside_it(ranks: list[dict[str, Any]], folder: Path) -> None:
    assert is_complete(folder / "whole/step=6.ckpt.dlion/dlion") and is_complete(
        folder / "again/step=6.ckpt.dlion/dlion"
    )
    assert sorted(path.name for path in (folder / "averaged").iterdir()) == ["step=3.ckpt"]


def test_all_ranks_validate_the_same_model(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["validated"] == second["validated"] and any(first["validated"])


def test_averaging_left_on_is_reported(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["averaged"] == second["averaged"]
    for rank in ranks:
        assert len([text for text in rank["averaging"] if "averaged" in text and "local_gradients" in text]) == 1


def test_a_checkpoint_without_momenta_is_reported(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len([text for text in rank["incomplete"] if "momentum of worker 0" in text]) == 1


def test_another_optimizer_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["refused"].startswith("configure_optimizers gave AdamW and gradients are local")
