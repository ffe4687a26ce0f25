"""A worker's own values of the model's buffers: normalisation statistics differ between workers."""

import torch
from torch import Tensor, nn

from dlion.layout import local, overwrite
from dlion.tallies import in_rank_order


class Buffers:
    """Values of the buffers of `model`, which holds one worker's at a time. They start as what is there."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values = [local(buffer).detach().clone() for buffer in model.buffers()]

    @torch.no_grad()
    def put(self) -> None:
        """Make the model's buffers these."""
        for own, buffer in zip(self.values, self._model.buffers(), strict=True):
            overwrite(local(buffer), own)

    @torch.no_grad()
    def keep(self) -> None:
        """Make these what the model's buffers are."""
        for own, buffer in zip(self.values, self._model.buffers(), strict=True):
            overwrite(own, local(buffer))

    def state_dict(self) -> dict[str, Tensor]:
        """Copies, by name."""
        names = (name for name, _ in self._model.named_buffers())
        return {name: own.clone() for name, own in zip(names, self.values, strict=True)}

    def load(self, values: dict[str, Tensor]) -> None:
        """Take up `values`, by name."""
        for (name, _), own in zip(self._model.named_buffers(), self.values, strict=True):
            own.copy_(values[name])


def synchronize(workers: list[Buffers]) -> None:
    """Give all workers the same: floating-point ones become the mean, added in rank order, all others worker 0's."""
    for values in zip(*(worker.values for worker in workers), strict=True):
        common = values[0]
        if common.is_floating_point():
            wide = torch.promote_types(common.dtype, torch.float32)
            common = in_rank_order(torch.stack([each.to(wide) for each in values]), Tensor.add_) / len(workers)
        for own in values:
            own.copy_(common)
