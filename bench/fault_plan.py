"""What shall go wrong: faults by worker, step and phase, and seeded plans of runs that meet them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

WORKERS = 4
STEPS = 24
SAVE_EVERY = 8
ELASTIC_STEPS = 60  # of which most come after the kill, so that the worker can come back
RETURN_STEPS = 120
LINK = "20mbit"  # a step's 20 kB each way take 20 ms on it and 2 ms on the machine's own

WAYS: tuple[tuple[str, ...], ...] = ((), ("--overlap",), ("--method", "dlion-avg"), ("--zeros", "exact"))

Kind = Literal["kill", "stop", "pause", "nan", "full", "slow"]
KINDS: dict[str, str] = {
    "kill": "`kill -9`",
    "stop": "SIGSTOP, for longer than the timeout",
    "pause": "SIGSTOP, and SIGCONT once another worker waits",
    "nan": "a batch of NaN",
    "full": "the disk is full",
    "slow": f"links of {LINK}",
}

PHASES: dict[str, str] = {
    "ballots": "before the ballots",
    "between": "between all-to-all and all-gather",
    "verdict": "after the verdict, before it is applied",
    "apply": "during apply",
    "saving": "while saving",
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: one of KINDS.
        rank: the worker that it happens to; of a slow link all.
        step: number of the optimizer step, from 1; "saving" is that of its checkpoint.
        phase: one of PHASES; "batch" for NaN, "always" for links.
        operation: of "saving": before which fsync or replace of that worker, from 1, after the step was done.
    """

    kind: Kind
    rank: int
    step: int
    phase: str
    operation: int = 1

    @property
    def name(self) -> str:
        """Unique within a run."""
        nth = f"-op{self.operation}" if self.phase == "saving" else ""
        return f"{self.kind}-rank{self.rank}-step{self.step}-{self.phase}{nth}"


@dataclass(frozen=True)
class Cell:
    """One run and what happens to it.

    Attributes:
        experiment: the table that it belongs to.
        flags: of `dlion train`, beside those that all cells have.
        returns: whether a new process takes the place of a killed worker while the others go on (elastic only).
    """

    experiment: str
    number: int
    faults: tuple[Fault, ...]
    steps: int = STEPS
    flags: tuple[str, ...] = ()
    returns: bool = False

    @property
    def name(self) -> str:
        """Unique among all cells of one seed."""
        return f"{self.experiment}-{self.number:03d}"

    def described(self) -> dict[str, Any]:
        """As JSON: finished cells are found again by it."""
        return {
            "cell": self.name,
            "experiment": self.experiment,
            "faults": [asdict(fault) for fault in self.faults],
            "steps": self.steps,
            "flags": list(self.flags),
            "returns": self.returns,
        }


def moved(cell: Cell, step: int) -> Cell:
    """The same cell with all its faults at this step."""
    return replace(cell, faults=tuple(replace(fault, step=step) for fault in cell.faults))


def random_fault(draw: random.Random, kinds: Sequence[str], steps: int) -> Fault:
    """A fault of one of these kinds when the second checkpoint is due: the first one is complete by then."""
    kind: Any = draw.choice(list(kinds))
    rank, step = draw.randrange(WORKERS), draw.randint(SAVE_EVERY + 1, steps - 1)
    step += SAVE_EVERY * (step <= 2 * SAVE_EVERY)
    if kind == "nan":
        return Fault(kind, rank, step, "batch")
    if kind == "slow":
        return Fault(kind, rank, 1, "always")
    phase = "saving" if kind == "full" else draw.choice(list(PHASES))
    if phase == "saving":
        # each worker has one file of its own and so at least one operation; rank 0 has all the others
        return Fault(kind, rank, 2 * SAVE_EVERY, phase, draw.randint(1, 6) if rank == 0 else 1)
    return Fault(kind, rank, step, phase)


def short_cells(draw: random.Random) -> Iterator[Cell]:
    """What continuous integration runs: three kinds in two runs, whose course without interruption is the same."""
    nan, steps = Fault("nan", draw.randrange(WORKERS), 5, "batch"), 2 * SAVE_EVERY + 3
    yield Cell("short", 0, (nan, Fault("kill", draw.randrange(WORKERS), steps - 1, "between")), steps)
    yield Cell("short", 1, (nan, Fault("full", 0, 2 * SAVE_EVERY, "saving", 2)), steps)


def static_cells(draw: random.Random) -> Iterator[Cell]:
    """A fixed number of workers: every kind, in every phase where it has some, each with a drawn worker and step."""
    faults: list[tuple[Fault, ...]] = []
    for kind in ("kill", "stop", "pause"):
        for phase in PHASES:
            one = random_fault(draw, [kind], STEPS)
            step = 2 * SAVE_EVERY if phase == "saving" else one.step
            faults.append((replace(one, phase=phase, step=step, operation=1),))
    for rank, operation in ((0, 1), (0, 2), (0, 4), (2, 1)):
        faults.append((Fault("full", rank, 2 * SAVE_EVERY, "saving", operation),))
    faults.append((Fault("full", 3, 2 * SAVE_EVERY, "apply"),))  # before the first file of the checkpoint
    faults.append(tuple(random_fault(draw, ["nan"], STEPS) for _ in range(6)))
    faults.append(tuple(Fault("nan", rank, 11, "batch") for rank in range(WORKERS)))  # nobody votes
    faults.append((Fault("slow", 0, 1, "always"),))
    faults.append((Fault("slow", 0, 1, "always"), Fault("kill", 1, 12, "between")))
    for number, chosen in enumerate(faults):
        yield Cell("static", number, tuple(dict.fromkeys(chosen)))
    for number, phase in enumerate(("between", "apply"), start=len(faults)):
        fault = replace(random_fault(draw, ["kill"], STEPS), phase=phase, operation=1)
        yield Cell("static", number, (fault,), flags=("--overlap",))


def soak_cells(draw: random.Random) -> Iterator[Cell]:
    """Runs without end: a fault of any kind that may end the run, and up to two before it that may not."""
    number = 0
    while True:
        last = random_fault(draw, [kind for kind in KINDS if kind != "slow"], STEPS)
        before = [random_fault(draw, ["nan", "pause"], STEPS) for _ in range(draw.randrange(3))]
        faults = [replace(fault, step=draw.randint(2, last.step - 1)) for fault in before if fault.phase != "saving"]
        if draw.random() < 0.3:
            faults.insert(0, random_fault(draw, ["slow"], STEPS))
        yield Cell("soak", number, tuple(dict.fromkeys([*faults, last])), flags=draw.choice(WAYS))
        number += 1


def elastic_cells(draw: random.Random) -> Iterator[Cell]:
    """60 runs with one kill each: twelve in every phase, three of every worker in each."""
    for number in range(60):
        phase, rank = list(PHASES)[number % 5], number // 5 % WORKERS
        yield Cell("elastic", number, (_kill(draw, rank, phase),), steps=ELASTIC_STEPS)


def return_cells(draw: random.Random) -> Iterator[Cell]:
    """20 runs with a kill in any phase, each with weights and data of its own, long enough to judge the return."""
    for number in range(20):
        fault = _kill(draw, draw.randrange(WORKERS), draw.choice(list(PHASES)))
        yield Cell("elastic-return", number, (fault,), RETURN_STEPS, ("--seed", str(number)), returns=True)


def whole_cells(draw: random.Random) -> Iterator[Cell]:
    """What `return_cells` are compared with: the same runs without a fault."""
    for number in range(20):
        yield Cell("elastic-whole", number, (), RETURN_STEPS, ("--seed", str(number)))


def _kill(draw: random.Random, rank: int, phase: str) -> Fault:
    if phase == "saving":  # the worker that leads has many file operations, each of the others one
        return Fault("kill", rank, draw.choice((1, 2)) * SAVE_EVERY, phase, draw.randint(1, 5) if rank == 0 else 1)
    return Fault("kill", rank, draw.randint(5, 20), phase)


CELLS = {
    "short": short_cells,
    "static": static_cells,
    "soak": soak_cells,
    "elastic": elastic_cells,
    "elastic-return": return_cells,
    "elastic-whole": whole_cells,
}


def cells(experiment: str, seed: int) -> Iterator[Cell]:
    """The runs of an experiment: a function of its name and the seed."""
    return CELLS[experiment](random.Random(f"{experiment} {seed}"))
