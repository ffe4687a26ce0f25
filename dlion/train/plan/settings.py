"""The flags of `dlion plan` and their legal values. Nothing here imports torch, so that `dlion --help` stays fast."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from dlion.settings import MOST_BUCKET_BYTES
from dlion.train.legal import require, require_count
from dlion.train.plan.cluster import BACKENDS, Cluster, Link
from dlion.train.plan.methods import Scene
from dlion.train.plan.rates import MEASURED_COPY, Rates
from dlion.train.plan.sizes import Sizes
from dlion.train.plan.votes import FULL_BYTES, Topology
from dlion.train.plan.work import Compute

SEVERAL = Parameter(consume_multiple=True, negative="", show_default=False)
DEFAULT_WORKERS = 32
GBIT, MICRO = 1e9 / 8, 1e-6
POSITIVE = ("bandwidth", "inside_bandwidth", "compute", "memory", "bucket_cap_mb")
NOT_NEGATIVE = ("latency", "inside_latency", "overhead", "ballot_ns", "tally_ns", "apply_ns", "generic_ns", "adamw_ns")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """One plan. Each field is a flag of `dlion plan` (per_node: --per-node).

    Raises:
        ValueError: a value is out of range; the message names the flag, the value and what is allowed.
    """

    parameters: float | None = None
    """Trainable parameters, such as 7e9; or give --model or --safetensors, which know the tensors too."""
    tensors: int | None = None
    """With --parameters: in how many tensors, each taken as a square matrix. One for each 2^20 parameters by default;
    PowerSGD depends on it."""
    model: str | None = None
    """A model of `dlion train` (gpt2pp-350m, vit-b16, ...), or bench, the GPT of `dlion bench`, which is taken when
    nothing else is given."""
    recipe: str | None = None
    """One of `dlion recipes`, or its file: its model, and its workers."""
    safetensors: Annotated[tuple[Path, ...], SEVERAL] = ()
    """Files of a model, whose headers give its tensors."""
    workers: int | None = None
    """Workers in all: the recipe's, or 32, unless given."""
    per_node: int = 8
    """Workers of a node, which share its link to the others."""
    bandwidth: float = 10.0
    """Of a node's link to the others, Gbit/s in each direction."""
    latency: float = 50.0
    """Of one hop between nodes, microseconds."""
    inside_bandwidth: float = 100.0
    """Of a worker's link inside its node, Gbit/s in each direction."""
    inside_latency: float = 10.0
    """Of one hop inside a node, microseconds."""
    overhead: float = 5.0
    """Of each message in a call in which everybody talks to everybody, microseconds."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """How the library makes its calls: nccl has trees for all-reduce, gloo sends small verdicts directly."""
    compute: float = 0.1
    """Seconds of forward and backward on the slowest worker."""
    backward_share: float = 2 / 3
    """Of --compute that is the backward pass, behind which an exchange can hide."""
    memory: float = MEASURED_COPY
    """GB/s that a copy reads and writes on the worker's device: all rates below that are not given follow it."""
    ballot_ns: float | None = None
    """Nanoseconds for each parameter to make a ballot: 0.2535 as measured on one CPU thread, unless given."""
    tally_ns: float | None = None
    """To count one ballot: 0.0056 unless given."""
    apply_ns: float | None = None
    """To apply a verdict: 0.1596 unless given."""
    generic_ns: float | None = None
    """All three for methods without fused kernels: 15.2 unless given."""
    adamw_ns: float | None = None
    """Of fused AdamW: 0.506 unless given."""
    topology: Topology = "auto"
    """Of the methods that vote; the plan compares the others too."""
    powersgd_rank: int = 2
    """Rank of PowerSGD's factors."""
    keep: float = 0.04
    """Share of the entries that graddrop and dgc send."""
    bucket_cap_mb: float = 25.0
    """Bucket size of DDP, MiB."""
    bucket_bytes: int | None = None
    """Of dlion: bytes of one-bit ballots, or of full-precision numbers, that travel together. 1 MiB, and 128 KiB of
    ballots with overlap, unless given."""

    def __post_init__(self) -> None:
        given = sum(one is not None for one in (self.parameters, self.model, self.recipe)) + bool(self.safetensors)
        if given > 1:
            raise ValueError(
                "--parameters, --model, --recipe and --safetensors all say what is trained: give one of them."
            )
        if self.parameters is not None:
            whole = math.isfinite(self.parameters) and self.parameters >= 1 and self.parameters % 1 == 0
            require(whole, "parameters", self.parameters, "a whole number, at least 1")
        require(
            self.tensors is None or self.parameters is not None,
            "tensors",
            self.tensors,
            "left out, or beside --parameters",
        )
        require(
            self.tensors is None or 1 <= self.tensors <= (self.parameters or 0),
            "tensors",
            self.tensors,
            "1 to --parameters",
        )
        for flag in ("workers", "per_node", "powersgd_rank"):
            require_count(flag, getattr(self, flag))
        for flag in (*POSITIVE, *NOT_NEGATIVE):
            value = getattr(self, flag)
            if flag in POSITIVE:
                require(math.isfinite(value) and value > 0, flag, value, "a finite number above 0")
            elif value is not None:
                require(math.isfinite(value) and value >= 0, flag, value, "a finite number, 0 or greater")
        fits = self.bucket_cap_mb * 2**20 >= FULL_BYTES
        require(fits, "bucket_cap_mb", self.bucket_cap_mb, "large enough for one parameter of 4 bytes")
        fits = self.bucket_bytes is None or (self.bucket_bytes > 0 and self.bucket_bytes % 8 == 0)
        require(fits, "bucket_bytes", self.bucket_bytes, "a positive multiple of 8")
        fits = self.bucket_bytes is None or self.bucket_bytes <= MOST_BUCKET_BYTES
        require(fits, "bucket_bytes", self.bucket_bytes, f"at most {MOST_BUCKET_BYTES:,}")
        require(0 <= self.backward_share <= 1, "backward_share", self.backward_share, "0 to 1")
        require(0 < self.keep <= 1, "keep", self.keep, "above 0 and at most 1")

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"safetensors": [str(path) for path in self.safetensors]}

    @property
    def size(self) -> int:
        """How many workers there are, where no recipe says it."""
        return self.workers or DEFAULT_WORKERS

    def cluster(self) -> Cluster:
        """The workers and their links."""
        between = Link(self.latency * MICRO, self.bandwidth * GBIT)
        inside = Link(self.inside_latency * MICRO, self.inside_bandwidth * GBIT)
        overhead = self.overhead * MICRO
        return Cluster(self.size, self.per_node, inside, between, overhead, BACKENDS[self.backend])

    def times(self) -> Compute:
        """Of forward and backward."""
        backward = self.compute * self.backward_share
        return Compute(self.compute - backward, backward)

    def rates(self) -> Rates:
        """Those given, the others by the rate of memory."""
        given = {name: getattr(self, f"{name}_ns") for name in ("ballot", "tally", "apply", "generic", "adamw")}
        return replace(Rates().at(self.memory), **{name: ns for name, ns in given.items() if ns is not None})

    def scene(self, sizes: Sizes) -> Scene:
        """What every method is asked about."""
        return Scene(
            sizes,
            self.size,
            self.rates(),
            self.topology,
            rank=self.powersgd_rank,
            keep=self.keep,
            bucket_cap_mb=self.bucket_cap_mb,
            bucket_bytes=self.bucket_bytes,
            on_device=self.backend == "nccl",
        )
