"""A worker's own values of the model's buffers: normalisation statistics differ between workers."""

import torch
from torch import Tensor, nn

from dlion.layout import dtype_of_sums, has_mean, local, overwrite
from dlion.tallies import in_rank_order


class Buffers:
    """Values of the buffers of `model`, which holds one worker's at a time. They start as what is there."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values = [local(buffer).detach().clone() for buffer in model.buffers()]
        self._forms = [(name, buffer.shape) for name, buffer in model.named_buffers()]

    @torch.no_grad()
    def put(self) -> None:
        """Make the model's buffers these."""
        for own, buffer in zip(self.values, self._of_now(), strict=True):
            overwrite(local(buffer), own)

    @torch.no_grad()
    def keep(self) -> None:
        """Make these what the model's buffers are."""
        for own, buffer in zip(self.values, self._of_now(), strict=True):
            overwrite(own, local(buffer))

    def _of_now(self) -> list[Tensor]:
        found = dict(self._model.named_buffers())
        if [(name, buffer.shape) for name, buffer in found.items()] != self._forms:
            had, has = (", ".join(names) or "none" for names in ([name for name, _ in self._forms], found))
            raise ValueError(
                f"the model's buffers or their shapes changed after the simulation was made (had: {had}; has: {has}): "
                "make a new simulation"
            )
        return list(found.values())

    def state_dict(self) -> dict[str, Tensor]:
        """Copies, by name."""
        return {name: own.clone() for (name, _), own in zip(self._forms, self.values, strict=True)}

    def load(self, values: dict[str, Tensor]) -> None:
        """Take up `values`, by name.

        Raises:
            ValueError: names or shapes are not those of this model; nothing was taken up.
        """
        for name in sorted({name for name, _ in self._forms} ^ values.keys()):
            where = "not given" if name not in values else "none of the model's"
            raise ValueError(f"the buffer {name!r} is {where}: give what buffers(rank) of the same model returned")
        for name, shape in self._forms:
            if values[name].shape != shape:
                raise ValueError(
                    f"the buffer {name!r} has shape {list(values[name].shape)} and needs {list(shape)}: give what "
                    "buffers(rank) of the same model returned"
                )
        for (name, _), own in zip(self._forms, self.values, strict=True):
            own.copy_(values[name])


def synchronize(workers: list[Buffers]) -> None:
    """Give all workers the same: real and complex ones become the mean, added in rank order, others worker 0's."""
    for values in zip(*(worker.values for worker in workers), strict=True):
        common = values[0]
        if has_mean(common):
            wide = dtype_of_sums(common.dtype)
            common = in_rank_order(torch.stack([each.to(wide) for each in values]), Tensor.add_) / len(workers)
        for own in values:
            own.copy_(common)
