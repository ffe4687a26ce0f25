"""What an optimizer asks its exchange about steps that were started and not waited for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dlion.asking import Ask, at_once
from dlion.errors import OverlapError


class Waited:
    """An exchange that waits for its steps: nothing is left to ask.

    Attributes:
        ask: how workers hear what they tell each other now and then.
    """

    ask: Ask = staticmethod(at_once)

    def look(self, now: bool = False) -> None:
        """Hear what became of the last step, and raise what was wrong with it: a collective call.

        Args:
            now: also hear of steps that were started by others than `step()`, a graph for instance.
        """

    def count(self) -> None:
        """Bring into the statistics what was counted in the steps so far."""

    def refuse_trouble(self) -> None:
        """Raise an error, on this worker alone, where a step was refused that nobody has heard of."""

    def gradient_is_there(self) -> None:
        """Backward has made a gradient, as the last that was started on the device."""

    def compares_gradients(self) -> bool:
        """Whether `refuse_changed` is to be called in this step."""
        return True

    def refuse_changed(self, names: Sequence[str], before: Sequence[Tensor], now: Sequence[Tensor]) -> None:
        """Raise an error, on this worker alone, where a gradient is not the one that it voted with.

        Args:
            names: of parameters whose ballots have left. before, now: digests of their gradients, u8[...]; an empty one
                stands for none.

        Raises:
            OverlapError
        """
        for name, then, value in zip(names, before, now, strict=True):
            if not torch.equal(then, value):
                raise OverlapError(changed(name))


def changed(name: str) -> str:
    """What is wrong where the gradient of this parameter is not the one that was voted with."""
    return (
        f"the gradient of {name} changed after its ballot had left (clipping, unscale_, zero_grad?), and overlap=True "
        "votes during backward: change gradients inside the model's own backward, or use overlap=False"
    )
