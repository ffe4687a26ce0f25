"""Where the time of a step goes."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

PHASES = ("ballot", "wait", "tally", "apply")

_NOTHING = nullcontext()


class Phases:
    """Seconds that one worker spends in each phase of its steps; off until `start()`, and free while it is off.

    While torch's profiler runs, each phase is a range of its own there: "dlion.ballot" and so on.

    "ballot": momentum, signs and bits, and handing them to the network; with `overlap=True` also finding out whether
    gradients changed. "wait": blocked until the network has brought something; with `overlap=True` what backward did
    not hide. "tally": counting, and handing verdicts to the network. "apply": moving parameters.
    On CPU tensors; work queued on an accelerator is not waited for.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._on = False

    def start(self) -> None:
        """Count from zero."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._on = True

    def stop(self) -> None:
        """Count no further; `seconds` stays."""
        self._on = False

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        """What is done inside counts for `phase`."""
        if _profiling():
            return self._named(phase)
        return self._counted(phase) if self._on else _NOTHING

    @contextmanager
    def _named(self, phase: str) -> Iterator[None]:
        with record_function(f"dlion.{phase}"), self._counted(phase) if self._on else _NOTHING:
            yield

    @contextmanager
    def _counted(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began


def _profiling() -> bool:
    try:
        return torch.autograd.profiler._is_profiler_enabled
    except AttributeError:  # a range is then made always, at 10 microseconds each
        return True
