"""What can go wrong with a worker in a step: which fault, of whom, when."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dlion.options import one_of

ABSENT, LATE, NAN, RANDOM, INVERTED, COLLUDING = "absent", "late", "nan", "random", "inverted", "colluding"

ACTS = {
    ABSENT: "computes nothing: its state rests, and it does not vote",
    LATE: "computes, and its state moves, but what it says is not counted, neither ballots nor answers of a survey",
    NAN: "all its gradients are NaN; `nonfinite=` says what follows",
    RANDOM: "sends random signs instead of its own",
    INVERTED: "sends the opposite of its own signs",
    COLLUDING: "sends the opposite of what the honest workers would decide among themselves",
}
ATTACKS = (RANDOM, INVERTED, COLLUDING)

Schedule = Callable[[int, int], str | None]


@dataclass(frozen=True)
class Fault:
    """One fault of some workers.

    Args:
        act: one of `ACTS`, which says what each does.
        workers: ranks.
        steps: in which steps of the simulation, counted from 0, skipped ones included; None: in all.

    Raises:
        ValueError: an unknown act, or workers or steps that are no collection of numbers.
    """

    act: str
    workers: Collection[int]
    steps: Collection[int] | None = None

    def __post_init__(self) -> None:
        one_of("act", self.act, tuple(ACTS))
        for name in ("workers", "steps"):
            value = getattr(self, name)
            listed = isinstance(value, Collection) and (isinstance(value, range) or all(map(_is_number, value)))
            if not listed and not (name == "steps" and value is None):
                raise ValueError(f"{name}={value!r} of a fault must be a collection of whole numbers, such as [1]")

    def strikes(self, rank: int, step: int) -> bool:
        """Whether this worker has it in this step."""
        return rank in self.workers and (self.steps is None or step in self.steps)


def _is_number(value: object) -> bool:
    return type(value) is int and value >= 0


def schedule_of(faults: Sequence[Fault], workers: int) -> Schedule:
    """(rank, step) -> the act, or None for an honest worker; of several faults the first counts.

    Raises:
        ValueError: a fault names a worker that does not exist.
    """
    for fault in faults:
        strangers = sorted(rank for rank in fault.workers if rank not in range(workers))
        if strangers:
            raise ValueError(f"{fault} is of worker {strangers[0]}, and there are workers 0 to {workers - 1}")
    return lambda rank, step: next((fault.act for fault in faults if fault.strikes(rank, step)), None)
