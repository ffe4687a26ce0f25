"""What a run is made of: the flags of `dlion train`, their legal values, and the TOML file that repeats a run.

Nothing here imports torch, so that `dlion --help` stays fast.
"""

import math
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Parameter

from dlion.train.checkpoint_flags import CheckpointFlags
from dlion.train.legal import require as require
from dlion.train.legal import require_count, shown
from dlion.train.method_flags import FIXED, MethodFlags
from dlion.train.reading import Reading
from dlion.train.record_flags import RecordFlags
from dlion.train.shape import ModelShape

DEFAULT_WORKERS = 4
DEFAULT_STEPS = 300
INSTEAD = {
    "simulate": "workers",
    "batch-sizes": "batch-size",
    "steps": "epochs",
}  # one stands in the place of the other
COUNTS = "workers simulate steps epochs batch_size accumulate threads".split()
DEFAULT_LR = 1e-3
LION_BETAS = (0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ModelShape, Reading, MethodFlags, CheckpointFlags, RecordFlags):
    """One run. Each field is a flag of `dlion train` and a key of its TOML file (batch_size: batch-size).

    Raises:
        ValueError: a value is out of range; the message names the flag, the value and what is allowed.
    """

    task: str = "fashion-mnist"
    """Data to train on: fashion-mnist, cifar10, image-folder, text, hf-text or instruct."""
    model: str | None = None
    """Model to train; the task names its default."""
    method: str = "dlion-mavo"
    """How the workers agree: dlion-mavo, dlion-avg, g-lion, g-adamw, or a baseline (docs/methods.md names all)."""
    workers: int | None = None
    """Workers, each with its own data stream: 4 unless a launcher such as torchrun says otherwise."""
    simulate: int | None = None
    """Instead of --workers: so many simulated ones, one after another in this process, with the same results."""
    steps: int | None = None
    """Optimizer steps in all: 300 unless --steps or --epochs is given."""
    epochs: int | None = None
    """Instead of --steps: how often each worker sees the whole training set."""
    shared_epochs: bool = False
    """--shared-epochs counts an epoch when all workers together have seen as many samples as there are."""
    batch_size: int = 32
    """Samples per worker and micro-batch."""
    batch_sizes: Annotated[tuple[int, ...] | None, Parameter(negative="", consume_multiple=True)] = None
    """Instead of --batch-size: one for each worker, in rank order."""
    accumulate: int = 1
    """Micro-batches whose gradients are averaged locally before each step."""
    lr: float | None = None
    """Learning rate: 1e-3 unless given, and the method's own where that is far from what it needs."""
    weight_decay: float = 0.0
    """Decoupled weight decay: every step multiplies the parameters by 1 - lr * weight_decay."""
    betas: Annotated[tuple[float, float] | None, Parameter(negative="")] = None
    """Decay rates of the Lion methods (0.9 0.99 unless given) and of g-adamw (0.9 0.999)."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up; cosine and linear end near 0 at the last step, so lengthening such a run
    with --resume changes the rates of the steps to come, and it differs from a run planned longer."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to --lr."""
    clip_norm: float | None = None
    """Largest norm of each worker's own gradient; longer ones are scaled down."""
    overlap: bool = False
    """--overlap sends ballots while backward still runs; the results are the same."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when every worker of this machine can have its own GPU, otherwise the CPU."""
    threads: int | None = None
    """CPU threads of each worker: OMP_NUM_THREADS, or its share of the cores, unless given. Results depend on it."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs forward and backward under autocast; parameters stay fp32."""
    seed: int = 0
    """Initial weights, order of the data, augmentation and dropout are functions of it."""
    init_from: str | None = None
    """Start from the parameters of a run's folder (its best model), or of a file of safetensors."""
    data: str | None = None
    """File or folder with the data, when it is not where the task looks by itself."""
    iid: bool = True
    """--no-iid sorts the training set by class and gives each worker its own part."""

    def __post_init__(self) -> None:
        self.check_shape()
        self.check_reading()
        self.check_checkpoints()
        self.check_records()
        for flag in COUNTS:
            require_count(flag, getattr(self, flag))
        for size in self.batch_sizes or ():
            require_count("batch_sizes", size)
        require(self.lr is None or _positive(self.lr), "lr", self.lr, "a finite number above 0")
        require(
            math.isfinite(self.weight_decay) and self.weight_decay >= 0.0,
            "weight_decay",
            self.weight_decay,
            "a finite number, 0 or above",
        )
        for beta in self.betas or ():
            require(0.0 <= beta < 1.0, "betas", beta, "two numbers in [0, 1)")
        require(
            self.clip_norm is None or _positive(self.clip_norm), "clip_norm", self.clip_norm, "a finite number above 0"
        )
        require_count("warmup_steps", self.warmup_steps, 0)
        require(0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2^63 - 1")
        require(_is_text(self.data), "data", ascii(self.data), "a path in valid UTF-8")
        require(_is_text(self.init_from), "init_from", ascii(self.init_from), "a path in valid UTF-8")
        if self.ties == FIXED and self.simulate is None:
            raise ValueError("--ties fixed is a rule for ablations, which only --simulate has: choose another one.")
        if self.overlap and self.simulate is not None:
            raise ValueError(
                "--overlap and --simulate contradict each other: simulated workers have no network to hide."
            )
        if self.overlap and self.clip_norm is not None:
            raise ValueError(
                "--overlap and --clip-norm contradict each other: gradients have voted before they could be clipped."
            )
        if self.shared_epochs and self.epochs is None:
            raise ValueError("--shared-epochs means nothing without --epochs: give both, or neither.")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"--steps {self.steps} and --epochs {self.epochs} contradict each other: give one of them."
            )
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(
                f"--warmup-steps must be smaller than --steps {self.steps}, and {self.warmup_steps} was given."
            )


@dataclass(frozen=True, kw_only=True)
class Settled(TrainConfig):
    """A TrainConfig in which nothing is left open: what runs, and what `config.toml` of a run holds."""

    model: str
    workers: int
    steps: int
    lr: float
    betas: tuple[float, float] | None

    def batch_of(self, rank: int) -> int:
        """Samples of a worker in each micro-batch."""
        return self.batch_sizes[rank] if self.batch_sizes else self.batch_size

    @property
    def samples_per_step(self) -> int:
        """Samples of all workers in a step."""
        return sum(map(self.batch_of, range(self.workers))) * self.accumulate


def settle(
    config: TrainConfig,
    *,
    model: str,
    workers: int,
    steps_per_epoch: int,
    lr: float = DEFAULT_LR,
    betas: tuple[float, float] | None = LION_BETAS,
) -> Settled:
    """Fill in what the user left open, from the method (`lr`, `betas`) and from what task and launcher say."""
    steps = config.epochs * steps_per_epoch if config.epochs else config.steps or DEFAULT_STEPS
    given = asdict(config) | {"model": model, "workers": workers, "steps": steps, "epochs": None}
    given["shared_epochs"] = False
    given["lr"] = config.lr or lr
    given["betas"] = config.betas or betas
    for name in ("data", "init_from", "pretrained", "tokenizer"):
        if given[name] is not None and Path(given[name]).exists():
            given[name] = str(Path(given[name]).resolve())
    return Settled(**given)


def learning_rate(config: Settled, step: int) -> float:
    """Learning rate of step 1..steps: a pure function of the step, so that resuming needs no scheduler state.

    It is never 0: the warm-up starts at lr / warmup_steps, and cosine and linear reach 0 one step after the last.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / (config.steps - config.warmup_steps)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    if config.schedule == "linear":
        return config.lr * (1.0 - done)
    return config.lr


def to_flags(config: TrainConfig) -> dict[str, Any]:
    """The fields that are set, under the names of their flags: what is written to `config.toml`."""
    flags = {
        name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for name, value in asdict(config).items()
        if value is not None
    }
    replaced = {other for flag, other in INSTEAD.items() if flag in flags}
    return {flag: value for flag, value in flags.items() if flag not in replaced}


def given_in(config: TrainConfig) -> dict[str, Any]:
    """The flags that differ from their defaults."""
    defaults = to_flags(TrainConfig())
    return {flag: value for flag, value in to_flags(config).items() if defaults.get(flag) != value}


def from_flags(flags: Mapping[str, Any]) -> Settled:
    """The inverse of `to_flags` for a settled run.

    Raises:
        ValueError: a flag is missing, unknown, or has a value of another type or out of range.
    """
    return Settled(**_fields(Settled, {"workers": flags.get("simulate"), **flags}))


def asked_by(flags: Mapping[str, Any]) -> TrainConfig:
    """The inverse of `to_flags` for what was asked for: flags that are not given keep their defaults.

    Raises:
        ValueError: a flag is unknown, or has a value of another type or out of range.
    """
    return TrainConfig(**_fields(TrainConfig, flags))


def _fields(kind: type[TrainConfig], flags: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        flag.replace("-", "_"): tuple(value) if isinstance(value, list) else value for flag, value in flags.items()
    }
    kinds = get_type_hints(kind)
    for name, allowed in kinds.items():
        default = getattr(kind, name)
        if not _is_a(fields.get(name, default), allowed):
            raise ValueError(f"{name.replace('_', '-')} cannot be {shown(repr(fields.get(name, default)))}")
    if unknown := fields.keys() - kinds.keys():
        raise ValueError(f"{shown(min(unknown))} is not a flag")
    return fields


def _is_a(value: object, kind: Any) -> bool:
    """Whether a value from a file has the type of a field: plain, optional, a tuple, or one of some literals."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        members = get_args(kind)
        if members[1:] == (...,):
            return isinstance(value, tuple) and all(_is_a(each, members[0]) for each in value)
        return isinstance(value, tuple) and len(value) == len(members) and all(map(_is_a, value, members))
    if get_args(kind):
        return any(_is_a(value, one) for one in get_args(kind))
    return type(value) is kind or (kind is float and type(value) is int and abs(value) <= sys.float_info.max)


def read_toml(path: Path) -> dict[str, Any]:
    """Flags from a TOML file.

    Raises:
        ValueError: there is no such file, or it is not TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the configuration file {path} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"the configuration file {path} is not valid TOML: {shown(str(error))}.") from None


def unknown_name(kind: str, name: str, known: list[str]) -> ValueError:
    """The error for a name that is not among `known`, with the nearest ones."""
    near = get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return ValueError(f"unknown {kind} {shown(repr(name))}: {hint}it must be one of {', '.join(known)}.")


def _is_text(path: str | None) -> bool:
    try:
        (path or "").encode()
    except UnicodeEncodeError:  # bytes of a file name that are no text; TOML has no word for them
        return False
    return True


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0.0
