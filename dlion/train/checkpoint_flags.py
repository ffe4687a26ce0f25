"""The flags of `dlion train` that say when checkpoints are written and which of them stay."""

from dataclasses import dataclass

from dlion.train.legal import require_count


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Checkpoints are written beside training. The last step always writes one."""

    save_every: int = 500
    """Steps between two checkpoints; the last step always writes one."""
    keep_checkpoints: int = 2
    """How many of the last checkpoints stay; the one with the best validation metric stays too."""

    def check_checkpoints(self) -> None:
        """Raise a ValueError for numbers out of range."""
        require_count("save_every", self.save_every)
        require_count("keep_checkpoints", self.keep_checkpoints)
