"""Signals that stop a command whose work is done by other processes: remembered, and noticed by whoever waits."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

from dlion.train.ranks import REPEAT_SECONDS, SIGNALS, handle_signals


class StopSignals:
    """Inside, the first signal is remembered, and a later one raises KeyboardInterrupt.

    Attributes:
        number: of the first signal, 0 while none came.
    """

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0

    def __enter__(self) -> "StopSignals":
        self._ready, self._wake = os.pipe()
        for end in (self._ready, self._wake):
            os.set_blocking(end, False)
        self._before: dict[signal.Signals, Any] = handle_signals(self._receive)
        self._woken = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._woken)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._ready)
        os.close(self._wake)

    def wait_beside(self, sentinels: list[int], seconds: float) -> None:
        """Wait for the end of a process or for a signal, whichever thread that reaches; at most so long."""
        if self._ready in wait([*sentinels, self._ready], seconds):
            os.read(self._ready, 4096)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > REPEAT_SECONDS:
            raise KeyboardInterrupt


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, these signals wait; a process started here holds them back until it calls `let_through`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """The end of `held_back` in a process that was started inside."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
