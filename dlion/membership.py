"""Which process group an optimizer votes in."""

import torch.distributed as dist

from dlion.channel import default_group
from dlion.errors import GroupNotReadyError
from dlion.options import check_process_group


class Membership:
    """A process group, or the default one, looked up when it is needed.

    A group cannot be pickled: what is unpickled is `lost` where a group had been given.

    Raises:
        ValueError: for what is no process group.
    """

    def __init__(self, group: dist.ProcessGroup | None, lost: bool = False) -> None:
        check_process_group(group)
        self.given = group
        self.lost = lost

    def __getstate__(self) -> dict[str, object]:
        return {"given": None, "lost": self.lost or self.given is not None}

    def group(self, who: str, before: int) -> dist.ProcessGroup | None:
        """The group of now, None for one worker alone.

        Args:
            who: asks, for the error's sake.
            before: how many workers voted so far.

        Raises:
            GroupNotReadyError: there is none, and every worker would train apart.
        """
        if self.lost:
            raise GroupNotReadyError(
                "this optimizer was unpickled and its process group could not travel with it: set "
                "optimizer.process_group before step()"
            )
        if self.given is not None:
            return self.given
        group = default_group(f"{who}.step()")
        if group is None and before > 1:
            raise GroupNotReadyError(
                f"the default process group of {before} workers was destroyed, so every worker would train apart: call "
                "torch.distributed.init_process_group() before the next step"
            )
        return group
