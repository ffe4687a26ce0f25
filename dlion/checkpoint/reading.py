"""What the workers here find in a checkpoint: what was theirs, or where others were saved the mean of all workers."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dlion.checkpoint.chunks import Chunk
from dlion.checkpoint.crew import Crew
from dlion.checkpoint.holdings import Holdings, parameter_of, parameters_of
from dlion.checkpoint.manifest import Manifest, damaged
from dlion.checkpoint.newcomers import mean_of_workers
from dlion.checkpoint.stacked import Stacked
from dlion.quoting import one_line
from dlion.sharding import is_sharded

SHOWN = 500  # letters of what torch says of files that it cannot read


def found_by(crew: Crew, folder: Path, manifest: Manifest, model: nn.Module) -> dict[int, Holdings]:
    """Of each worker here, from files that were verified; of sharded parameters this process' own part.

    Raises:
        CheckpointError: the files are not what a checkpoint is.
    """
    try:
        search = _Search(Stacked(folder), manifest.workers, crew, model)
        return {worker: search.found_by(worker) for worker in crew.here}
    except Exception as error:
        raise damaged(folder, f"{type(error).__name__}: {one_line(str(error), SHOWN)}") from error


def _is_shared(key: str) -> bool:
    """Whether all workers share what lies there."""
    return key.startswith(("parameter/", "shared/"))


class _Search:
    """One process looks for what the workers here go on from.

    Args:
        workers: how many were saved.
    """

    def __init__(self, stacked: Stacked, workers: int, crew: Crew, model: nn.Module) -> None:
        self.stacked, self.workers, self.crew = stacked, workers, crew
        self.shards = stacked.processes // workers
        shared = [key for key in stacked.keys if _is_shared(key)]
        self.own = [key for key in stacked.keys if not _is_shared(key)]
        sizes = {key: stacked.size(key) for key in shared} | {key: stacked.size(key)[1:] for key in self.own}
        here = {name: Chunk.of(param) for name, param in parameters_of(model) if is_sharded(param)}
        chunks = {key: here[name] for key in sizes if (name := parameter_of(key)) in here}
        # what has not the parameter's shape is whole everywhere, or for `check_fit` to refuse
        self.parts = {key: chunk for key, chunk in chunks.items() if sizes[key] == chunk.size}
        self.sizes = {key: sizes[key] for key in self.parts}
        self.common = stacked.common(shared, self.parts)
        self._means: dict[range, dict[str, Tensor]] = {}  # many simulated workers start from one

    def found_by(self, worker: int) -> Holdings:
        """What a worker here goes on from."""
        own: dict[str, Tensor] = {}
        for rows, keys in self._by_rows(worker).items():
            if len(rows) == 1:
                own |= self.stacked.rows(keys, rows[0], self.parts)
                continue
            if rows not in self._means:
                self._means[rows] = mean_of_workers(self.stacked.rows(keys, row, self.parts) for row in rows)
            own |= self._means[rows]
        return Holdings(self.common, own, self._said(worker), self.sizes)

    def _by_rows(self, worker: int) -> dict[range, list[str]]:
        """From the mean of which rows a worker starts, and with which tensors.

        Each worker has a row. What is not sharded, each process of a worker has for itself, and a row: buffers.
        """
        found: dict[range, list[str]] = {}
        for key in self.own:
            count = self.stacked.size(key)[0]
            each = count // self.workers
            if self.workers != self.crew.size:
                rows = range(count)
            elif each == self.crew.shards:
                number = self.crew.number(worker)
                rows = range(number, number + 1)
            else:
                rows = range(worker * each, (worker + 1) * each)
            found.setdefault(rows, []).append(key)
        return found

    def _said(self, worker: int) -> Any:
        if self.workers != self.crew.size:
            return self.stacked.said(0)
        return self.stacked.said(worker, self.crew.shard if self.shards == self.crew.shards else 0)
