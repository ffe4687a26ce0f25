"""`dlion train --simulate`: all workers in this process, which answers signals as a launcher does."""

import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import nn

from dlion.simulate import Simulation
from dlion.train.config import Settled
from dlion.train.failure import Failure
from dlion.train.ranks import REPEAT_SECONDS, handle_signals, one_line, threads_for
from dlion.train.workers import AllInOne, choices


@dataclass
class Signals:
    """The first signal asks the run to stop after the step at hand; one that comes later ends it at once."""

    number: int = 0
    _since: float = field(default=0.0, repr=False)

    def reached(self, step: int) -> bool:
        """Whether to stop now, after `step`."""
        return bool(self.number)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """What is called when a signal comes."""
        if not self.number:
            self.number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > REPEAT_SECONDS:
            raise KeyboardInterrupt

    @contextmanager
    def listening(self) -> Iterator["Signals"]:
        """Listen as long as the context lasts."""
        previous = handle_signals(self.receive)
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class Simulated:
    """This process as the place where `size` workers compute."""

    size: int
    device: torch.device
    stop: Signals = field(default_factory=Signals)

    @property
    def threads(self) -> int:
        """Of each worker: as many as a real one would have, so that results are equal."""
        return threads_for(self.size)

    def workers(self, config: Settled, model: nn.Module) -> AllInOne:
        """All of them, around the one model."""
        threads = config.threads or self.threads
        return AllInOne(self.device, threads, self.stop, model, Simulation(model, workers=self.size, **choices(config)))

    def run(self, work: Callable[["Simulated"], None]) -> Failure | None:
        """Do `work` here, listening to signals; what failed, None when all went well."""
        try:
            with self.stop.listening():
                work(self)
        except Exception as error:
            return Failure("the simulation", one_line(error).rstrip("."), traceback.format_exc())
        return None

    @property
    def status(self) -> int:
        """The exit status when nothing failed: 0, or 128 + the number of the signal that stopped the run."""
        return 128 + self.stop.number if self.stop.number else 0
