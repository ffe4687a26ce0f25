"""Work for the next step that is done while this one computes."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

Make = Callable[[Tensor, int, int, int], Tensor]  # (index, seed, rank, step) -> pixels, and nothing else matters


@dataclass(frozen=True, eq=False)
class Ahead:
    """Makes a worker's pixels of the step after the one it asks for, in a thread of its own.

    It begins when a worker has asked for two steps in a row: who asks once, as a launcher that only looks whether there
    are data, is left without a thread, which would not survive its fork. What is made depends on its arguments alone,
    so that it does not matter where.
    """

    _last: dict[tuple[int, int], int] = field(default_factory=dict)
    _begun: dict[tuple[int, int], tuple[int, Tensor, "Future[Tensor]"]] = field(default_factory=dict)
    _threads: dict[int, ThreadPoolExecutor] = field(default_factory=dict)  # by process: a fork has none of its parent's

    def take(
        self, make: Make, index: Tensor, following: Callable[[], Tensor], seed: int, rank: int, step: int
    ) -> Tensor:
        """`make(index, seed, rank, step)`, and begin that of `following()` at the next step.

        Raises: whatever `make` raises, at the step it belongs to.
        """
        worker = (seed, rank)
        begun = self._begun.pop(worker, None)
        if begun is not None and begun[0] == step and torch.equal(begun[1], index):
            made = begun[2].result()
        else:
            made = make(index, seed, rank, step)
        if self._last.get(worker) == step - 1:
            coming = following()
            self._begun[worker] = (step + 1, coming, self._thread().submit(make, coming, seed, rank, step + 1))
        self._last[worker] = step
        return made

    def _thread(self) -> ThreadPoolExecutor:
        here = os.getpid()
        if here not in self._threads:
            count = torch.get_num_threads()  # a new thread would take as many as there are cores
            self._threads[here] = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(count,))
        return self._threads[here]
