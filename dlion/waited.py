"""What an optimizer asks its exchange about steps that were started and not waited for."""

from dlion.asking import Ask, at_once


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
