"""Who is compared: the same model under each way of training it with several workers."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import dlion
from dlion.train.bench import formulas
from dlion.train.bench.model import build_gpt, loss_of
from dlion.train.bench.settings import BenchConfig, Flag
from dlion.train.ranks import Ranks

LR = 1e-4
POWERSGD_RANK = 2
POWERSGD_START = 2  # uncompressed steps before: the fewest that warm start and error feedback allow


class Parts(NamedTuple):
    """Seconds of one step.

    Attributes:
        forward: the forward pass and the loss.
        backward: the backward pass, with what waits inside it.
        update: the optimizer's step.
        vote_seconds: what dlion's phases took inside the backward pass.
    """

    forward: float
    backward: float
    update: float
    vote_seconds: float

    @property
    def whole(self) -> float:
        """Of the step."""
        return self.forward + self.backward + self.update

    @property
    def compute(self) -> float:
        """Forward and backward without what votes inside them."""
        return self.forward + self.backward - self.vote_seconds


@dataclass
class Contender:
    """One way to take a step.

    Attributes:
        name: as in the results.
        module: what forward runs through.
        optimizer: what steps.
        bytes_by_formula: bytes that each worker sends in a step; asked after the last step.
        warm_up: steps before the first that counts: DDP lays out its buckets anew after one, PowerSGD begins with
            uncompressed ones, dlion compares gradients in the first three. The last of them says how long a step is.
        notes: options that the results name.
    """

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    bytes_by_formula: Callable[[], float]
    warm_up: int
    notes: dict[str, Any] = field(default_factory=dict)

    def step(self, batch: Tensor) -> Parts:
        """Take one step."""
        moments = [_now(batch)]
        loss = loss_of(self.module, batch)
        moments.append(_now(batch))
        before = self._vote_seconds()
        torch.autograd.backward(loss)
        vote_seconds = self._vote_seconds() - before
        moments.append(_now(batch))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        moments.append(_now(batch))
        forward, backward, update = (end - start for start, end in pairwise(moments))
        return Parts(forward, backward, update, vote_seconds)

    @property
    def voter(self) -> dlion.Distributed | None:
        """dlion's optimizer, where this is one: it counts bytes and times phases."""
        return self.optimizer if isinstance(self.optimizer, dlion.Distributed) else None

    def _vote_seconds(self) -> float:
        return sum(self.voter.phases.seconds.values()) if self.voter is not None else 0.0


def build(flag: Flag, config: BenchConfig, ranks: Ranks) -> list[Contender]:
    """The contender that a flag names, with a model of its own: of ddp-fp32, one for each bucket size."""
    if flag == "ddp-fp32":
        return [_ddp(config, ranks, cap) for cap in config.bucket_cap_mb]
    makers = {
        "no-communication": _alone,
        "ddp-fp16": _half,
        "powersgd-2": _powersgd,
        "dlion": _dlion,
        "dlion-overlap": _overlap,
    }
    return [makers[flag](config, ranks)]


def _alone(config: BenchConfig, ranks: Ranks) -> Contender:
    model = build_gpt(config, ranks.device)
    return Contender("no communication", model, _adamw(model), lambda: 0.0, 2)


def _ddp(config: BenchConfig, ranks: Ranks, cap: float) -> Contender:
    model = _replica(config, ranks, cap)
    sent = formulas.ring(4.0 * _size(model), ranks.channel.size)
    return Contender("ddp fp32", model, _adamw(model), lambda: sent, 1, {"bucket_cap_mb": cap})


def _half(config: BenchConfig, ranks: Ranks) -> Contender:
    model = _replica(config, ranks)
    gpu = ranks.device.type == "cuda"
    model.register_comm_hook(None, default_hooks.bf16_compress_hook if gpu else default_hooks.fp16_compress_hook)
    sent = formulas.ring(2.0 * _size(model), ranks.channel.size)
    return Contender("ddp bf16" if gpu else "ddp fp16", model, _adamw(model), lambda: sent, 2)


def _powersgd(config: BenchConfig, ranks: Ranks) -> Contender:
    model = _one_bucket(config, ranks) if ranks.device.type == "cpu" else _replica(config, ranks)
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def sent() -> float:
        before, after = state.total_numel_before_compression, state.total_numel_after_compression
        return formulas.ring(4.0 * _size(model) * after / before, ranks.channel.size) if before else 0.0

    notes = {
        "matrix_approximation_rank": POWERSGD_RANK,
        "start_powerSGD_iter": POWERSGD_START,
        "use_error_feedback": state.use_error_feedback,
        "warm_start": state.warm_start,
        "min_compression_rate": state.min_compression_rate,
        "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
    }
    return Contender(f"powersgd {POWERSGD_RANK}", model, _adamw(model), sent, POWERSGD_START + 2, notes)


def _dlion(config: BenchConfig, ranks: Ranks) -> Contender:
    return _voter("dlion", config, ranks, overlap=False)


def _overlap(config: BenchConfig, ranks: Ranks) -> Contender:
    return _voter("dlion overlap", config, ranks, overlap=True)


def _voter(name: str, config: BenchConfig, ranks: Ranks, *, overlap: bool) -> Contender:
    model = dlion.local_gradients(build_gpt(config, ranks.device))
    optimizer = dlion.DistributedLion(model.named_parameters(), LR, vote=config.vote, overlap=overlap)
    sent = formulas.votes(_size(model), ranks.channel.size, config.vote)
    notes = {"vote": config.vote, "bucket_bytes": optimizer.options.bucket_on(ranks.device)}
    return Contender(name, model, optimizer, lambda: sent, 4, notes)


def _replica(config: BenchConfig, ranks: Ranks, cap: float | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(build_gpt(config, ranks.device), bucket_cap_mb=cap)


def _one_bucket(config: BenchConfig, ranks: Ranks) -> DistributedDataParallel:
    """PowerSGD's calls for a bucket follow one another as Gloo's threads get to them, so with several buckets ranks
    mix up their order, and Gloo ends the process ("op.preamble.length <= op.nbytes").
    """
    return _replica(config, ranks, 4 * _size(build_gpt(config, ranks.device)) / 2**20 + 1)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def _size(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _now(batch: Tensor) -> float:
    if batch.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
