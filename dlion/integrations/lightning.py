"""Lightning: a strategy under which gradients stay local, and checkpoints keep every worker's momentum."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlion.integrations import ddp, momenta
from dlion.optim import Distributed

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError('dlion.integrations.lightning needs lightning: pip install "dlion[lightning]"') from error

STATE = ".dlion"  # beside a checkpoint: every worker's state, in a folder of the same name and this


class VotingStrategy(DDPStrategy):
    """DDP without averaging, for `dlion.DistributedLion` or `dlion.Distributed` from `configure_optimizers`.

        Trainer(strategy=VotingStrategy(), devices=4, ...)

    Takes the arguments of Lightning's `DDPStrategy`. Beside each checkpoint `NAME.ckpt` stands a folder
    `NAME.ckpt.dlion` with every worker's momentum; who resumes without it is warned. Buffers are made equal before
    validation, testing and saving.

    Raises:
        ValueError: from `fit`: an optimizer is none of dlion's, which would train every worker apart; or DDP was given
            a communication hook.
    """

    strategy_name = "dlion"

    def configure_ddp(self) -> None:
        super().configure_ddp()
        ddp.local_gradients(self.model)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Distributed):
                raise ValueError(
                    f"configure_optimizers gave {type(optimizer).__name__} and gradients are local, so every worker "
                    "would train apart: give dlion.DistributedLion or dlion.Distributed, or take another strategy"
                )

    def on_validation_start(self) -> None:
        self._synchronize()

    def on_test_start(self) -> None:
        self._synchronize()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._synchronize()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint:  # not of weights alone
            momenta.save(f"{filepath}{STATE}", [self.lightning_module], self._bare())

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}{STATE}", ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._loaded_from = checkpoint_path
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        momenta.load(f"{self._loaded_from}{STATE}", [self.lightning_module], self._bare())

    def _synchronize(self) -> None:
        ddp.synchronize_buffers(self.lightning_module)

    def _bare(self) -> list[Distributed]:
        return [one._optimizer if isinstance(one, LightningOptimizer) else one for one in self.optimizers]
