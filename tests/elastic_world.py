"""Elastic workers as threads, at a real lighthouse with real Gloo groups; their deaths, phase by phase."""

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("RUST_LOG", "error")  # its log is written by Rust
pytest.importorskip("torchft", reason="elastic workers need torchft: pip install -r requirements/elastic.txt")

from dlion.elastic import Elastic
from dlion.elastic.quorum import LighthouseServer
from dlion.ops.bits import checksum

SECONDS = 30.0  # after which any wait of a test has failed
BETAS = (0.9, 0.99)


class Killed(BaseException):
    """Raised where a test lets a worker die."""


@contextmanager
def lighthouse(min_workers: int) -> Iterator[str]:
    """The address of a lighthouse that forgets the dead quickly."""
    server = LighthouseServer(min_workers, join_timeout=SECONDS, heartbeat_timeout=0.6)
    try:
        yield server.address
    finally:
        server.close()


def model_of(seed: int) -> nn.Module:
    """A model that spans several buckets of 64 bytes; its own generator, since threads share torch's."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 10))
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator)
    return model


def gradient(worker: int, position: int, index: int, shape: torch.Size) -> Tensor:
    """A pure function of who and when."""
    generator = torch.Generator().manual_seed(1_000_003 * worker + 1009 * position + index)
    return torch.randn(shape, generator=generator)


@dataclass
class Worker:
    """One life of a worker: what it does, and what became of it.

    Attributes:
        number: of the worker. seed: of its first model.
        sabotage: called with the optimizer before each step; may let the worker die in it.
        begins: it starts when this is set.
        heard: whose notes came with the commit of each step.
    """

    number: int
    seed: int = 0
    sabotage: Callable[[Elastic], None] = lambda optimizer: None
    begins: threading.Event | None = None
    options: dict[str, Any] = field(default_factory=dict)
    died: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    model: nn.Module | None = None
    optimizer: Elastic | None = None
    joined: int = -1
    ended: float = 0.0
    news: list[str] = field(default_factory=list)
    heard: dict[int, list[int]] = field(default_factory=dict)

    def live(self, address: str, workers: int, steps: int) -> None:
        """Train until `steps` were committed."""
        try:
            if self.begins is not None:
                assert self.begins.wait(SECONDS)
            torch.set_num_threads(1)
            self.model = model_of(self.seed)
            patience = {"timeout": 10.0, "quorum_timeout": SECONDS, "start_timeout": SECONDS}
            given = {"topology": "sharded", "bucket_bytes": 64, "quorum_every": 2, **patience, **self.options}
            who = {"lighthouse": address, "worker": self.number, "workers": workers}
            lr = given.pop("lr", 1e-2)
            self.optimizer = Elastic(self.model.named_parameters(), lr=lr, module=self.model, **who, **given)
            self._train(self.optimizer, steps)
        except BaseException as error:
            if not isinstance(error, Killed):
                traceback.print_exc()
            self.error = error
        finally:
            if self.optimizer is not None:
                self.optimizer.close()
            self.ended = time.monotonic()
            self.died.set()

    def _train(self, optimizer: Elastic, steps: int) -> None:
        assert self.model is not None
        optimizer.luggage = {"from": self.number}
        while optimizer.position < steps:
            for index, param in enumerate(self.model.parameters()):
                param.grad = gradient(self.number, optimizer.position, index, param.shape)
            self.sabotage(optimizer)
            optimizer.step()
            self.heard[optimizer.position] = sorted(optimizer.notes)
            self.news += optimizer.news
            optimizer.news.clear()
            if self.joined < 0:
                self.joined = optimizer.position - 1

    @property
    def state(self) -> tuple[int, int, int]:
        """Position, t and checksum of the parameters."""
        assert self.optimizer is not None and self.model is not None
        return self.optimizer.position, self.optimizer.param_groups[0]["t"], checksum(list(self.model.parameters()))

    def momentum(self, index: int) -> Tensor:
        assert self.optimizer is not None and self.model is not None
        kept: Tensor = self.optimizer.state[list(self.model.parameters())[index]]["exp_avg"]
        return kept


def live_together(lives: list[Worker], steps: int, workers: int, min_workers: int) -> None:
    """Let all of them train, until all have come to an end."""
    with lighthouse(min_workers) as address:
        threads = [threading.Thread(target=life.live, args=(address, workers, steps), daemon=True) for life in lives]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
        stuck = [life.number for life, thread in zip(lives, threads, strict=True) if thread.is_alive()]
        assert not stuck, f"workers {stuck} hang"


def momentum_once_a_step(worker: int, steps: range, index: int, start: Tensor) -> Tensor:
    """What the momentum must be if the rule ran exactly once for each step."""
    keep, take = torch.tensor(BETAS[1], dtype=torch.float32), torch.tensor(1 - BETAS[1], dtype=torch.float32)
    momentum = start.clone()
    for position in steps:
        momentum = momentum * keep + gradient(worker, position, index, start.shape) * take
    return momentum
