"""The flags of `dlion compare` and the study that they make. Nothing here imports torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from dlion.train.bench.settings import SEVERAL
from dlion.train.compare.axes import Value
from dlion.train.compare.study import SEED, Study
from dlion.train.config import DEFAULT_WORKERS
from dlion.train.legal import require, require_count

NONE_OR_SEVERAL = Parameter(consume_multiple=True, negative="", show_default=False)
METHODS = ("dlion-mavo", "dlion-avg", "g-lion", "g-adamw")
RUNNING = ("limit_minutes", "jobs", "mbit", "step_ms", "data")  # how, and not what


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """A study on the command line. Flags after `--` go to every run of `dlion train`.

    Raises:
        ValueError: a value is out of range; the message names the flag, the value and what is allowed.
    """

    task: str = "fashion-mnist"
    """Data to train on: fashion-mnist, cifar10 or text."""
    methods: Annotated[tuple[str, ...], SEVERAL] = METHODS
    """What is compared."""
    workers: Annotated[tuple[int, ...], SEVERAL] = (DEFAULT_WORKERS,)
    """Numbers of workers."""
    batch_sizes: Annotated[tuple[int, ...], NONE_OR_SEVERAL] = ()
    """Samples per worker and step; `dlion train`'s own unless given."""
    iid: Literal["yes", "no", "both"] = "yes"
    """Whether all workers draw from the whole set, or each from its own part, sorted by class."""
    seeds: Annotated[tuple[int, ...], SEVERAL] = (1, 2, 3)
    """Seeds over which means and spreads are taken."""
    lrs: Annotated[tuple[float, ...], SEVERAL] = (3e-4, 1e-3, 3e-3)
    """Learning rates that are tried with each method."""
    weight_decays: Annotated[tuple[float, ...], NONE_OR_SEVERAL] = ()
    """Weight decays that are tried with each method; `dlion train`'s own unless given."""
    tune_seed: int | None = None
    """Search the grid with this seed at the first number of workers only; then run the best setting with all seeds and
    numbers of workers. Without it the grid is searched everywhere, with all seeds."""
    metric: Literal["val_accuracy", "best_val_accuracy", "val_loss", "best_val_loss"] | None = None
    """What the best setting is best at: the accuracy after the last step (without one, the loss) unless given."""
    simulate: bool = False
    """--simulate runs all workers in one process."""
    limit_minutes: float | None = None
    """Stop after this time, and go on from there when the same command is repeated."""
    jobs: int = 1
    """Runs at once."""
    mbit: float = 100.0
    """Bandwidth in Mbit/s for the estimate of time."""
    step_ms: float | None = None
    """Milliseconds that a worker computes in a step, for the estimate of time: as measured in these runs unless
    given."""
    data: str | None = None
    """File or folder with the data, when it is not where the task looks by itself."""

    def __post_init__(self) -> None:
        require_count("jobs", self.jobs)
        for flag in ("workers", "batch_sizes"):
            for value in getattr(self, flag):
                require_count(flag, value)
        for flag, given in (("seeds", self.seeds), ("tune_seed", (self.tune_seed or 0,))):
            for seed in given:
                require(0 <= seed < 2**63, flag, seed, "between 0 and 2^63 - 1")
        for flag in ("limit_minutes", "mbit", "step_ms"):
            value = getattr(self, flag)
            legal = value is None or (math.isfinite(value) and value >= 0 and (value > 0 or flag == "step_ms"))
            require(legal, flag, value, "a finite number above 0")
        for flag in ("methods", "workers", "seeds", "lrs"):
            require(len(getattr(self, flag)) > 0, flag, "nothing", "one value or more")

    @property
    def asked(self) -> list[str]:
        """Flags that were given and say what is compared."""
        defaults = CompareConfig()
        names = [one.name for one in fields(self) if one.name not in RUNNING]
        return [name for name in names if getattr(self, name) != getattr(defaults, name)]


def study_of(config: CompareConfig, train: Mapping[str, Any]) -> Study:
    """The study that the flags describe; `train`: flags of all runs."""
    iid = {"yes": (True,), "no": (False,), "both": (True, False)}[config.iid]
    vary = {
        "method": config.methods,
        "workers": config.workers,
        "batch-size": config.batch_sizes,
        "iid": iid if config.iid != "yes" else (),
        SEED: config.seeds,
    }
    tune = None
    if config.tune_seed is not None:
        tune = {"workers": Value.of("workers", config.workers[0]), SEED: Value.of(SEED, config.tune_seed)}
    return Study(
        train={"task": config.task, **train},
        vary={axis: tuple(Value.of(axis, value) for value in values) for axis, values in vary.items() if values},
        grid={
            axis: tuple(Value.of(axis, value) for value in values)
            for axis, values in (("lr", config.lrs), ("weight-decay", config.weight_decays))
            if values
        },
        tune=tune,
        metric=config.metric,
        simulate=config.simulate,
    )
