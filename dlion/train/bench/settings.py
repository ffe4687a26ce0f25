"""The flags of `dlion bench` and their legal values. Nothing here imports torch, so that `dlion --help` stays fast."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from dlion.train.legal import require, require_count

HEAD = 64  # width of an attention head
Flag = Literal["no-communication", "ddp-fp32", "ddp-fp16", "powersgd-2", "dlion", "dlion-overlap"]
FLAGS: tuple[Flag, ...] = ("no-communication", "ddp-fp32", "ddp-fp16", "powersgd-2", "dlion", "dlion-overlap")
SEVERAL = Parameter(consume_multiple=True, negative="", show_default=lambda values: " ".join(map(str, values)))


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One measurement. Each field is a flag of `dlion bench` (batch_size: --batch-size).

    The model is a GPT over bytes with random tokens; with the default sizes it has 4,902,144 parameters.

    Raises:
        ValueError: a value is out of range; the message names the flag, the value and what is allowed.
    """

    workers: int | None = None
    """Workers: 4 unless a launcher such as torchrun says otherwise. Each has OMP_NUM_THREADS threads, or its share
    of the machine's cores."""
    contenders: Annotated[tuple[Flag, ...], SEVERAL] = FLAGS
    """What to measure, one or more after one flag: --contenders ddp-fp32 dlion. On NCCL ddp-fp16 compresses to bf16 and
    is called ddp-bf16 in the results."""
    vote: Literal["majority", "average"] = "majority"
    """How dlion's votes are counted."""
    width: int = 256
    """Width of the GPT, a multiple of 64; its gated MLPs are 2.75 times as wide."""
    layers: int = 6
    """Layers of the GPT."""
    tokens: int = 64
    """Tokens of a sequence."""
    batch_size: int = 2
    """Sequences for each worker and step. With more of them a step computes longer and sends as much."""
    bucket_cap_mb: Annotated[tuple[float, ...], SEVERAL] = (1.0, 5.0, 25.0)
    """Bucket sizes tried with ddp-fp32, in MiB, one or more after one flag; the best is measured."""
    seconds: float = 60.0
    """Length of the whole measurement, about; where steps are slow, longer: each contender takes at least 3."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when every worker of this machine can have its own GPU, otherwise the CPU."""

    def __post_init__(self) -> None:
        require_count("workers", self.workers, 2)
        require_count("width", self.width)
        require(self.width > 0 and self.width % HEAD == 0, "width", self.width, f"a positive multiple of {HEAD}")
        for flag in ("layers", "tokens", "batch_size"):
            require_count(flag, getattr(self, flag))
        require(math.isfinite(self.seconds) and self.seconds > 0, "seconds", self.seconds, "a finite number above 0")
        _distinct("contenders", self.contenders)
        _distinct("bucket_cap_mb", self.bucket_cap_mb)
        for cap in self.bucket_cap_mb:
            require(math.isfinite(cap) and cap > 0, "bucket_cap_mb", cap, "finite numbers above 0")

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "BenchConfig":
        """The inverse of `to_json`, after a journey as text."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in told.items()
        }
        return cls(**fields)


def _distinct(flag: str, values: tuple[object, ...]) -> None:
    given = " ".join(map(str, values)) or "nothing"
    require(len(values) > 0 and len(set(values)) == len(values), flag, given, "one or more, each only once")
