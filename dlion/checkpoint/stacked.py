"""Files of torch.distributed.checkpoint: what all workers share once, what each has for itself as T[workers, *shape].

Every worker writes a file of its own, and reads the rows that it wants: nothing is sent from one to another but where
each row lies, as JSON. The index is torch's own, which is a pickle: reading one of unknown origin runs its code.
"""

import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

INDEX = ".metadata"
OBJECT = "worker"

Place = list[Any]  # of what was written, in JSON: key, offset or None, bytes, file, first byte, length


def file_of(rank: int) -> str:
    """Where a worker's part lies."""
    return f"__{rank}_0.distcp"


class Part:
    """What one of `workers` writes: its rows, what it has to say beside tensors, and worker 0 what all share.

    Args:
        common: equal on all workers. own: not so. All on the CPU.
        said: bytes.
    """

    def __init__(self, rank: int, workers: int, common: dict[str, Tensor], own: dict[str, Tensor], said: bytes) -> None:
        self.rank, self.workers, self.common, self.own, self.said = rank, workers, common, own, said

    @property
    def form(self) -> list[list[Any]]:
        """What must be equal on all workers, in JSON: key, shape and dtype of each row."""
        return [[key, list(row.shape), str(row.dtype)] for key, row in sorted(self.own.items())]

    def plan(self, rank: int) -> SavePlan:
        """What a worker writes; all write the like."""
        items = [WriteItem(MetadataIndex(f"{OBJECT}/{rank}"), WriteItemType.BYTE_IO)]
        for key, row in sorted(self.own.items()):
            offset, size = torch.Size([rank, *[0] * row.dim()]), torch.Size([self.workers, *row.shape])
            chunk = ChunkStorageMetadata(offset, torch.Size([1, *row.shape]))
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(row), size)
            items.append(WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data))
        for key, value in sorted(self.common.items()) if rank == 0 else ():
            chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(value), value.shape)
            items.append(WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.TENSOR, tensor_data=data))
        return SavePlan(items)

    def write(self, folder: Path) -> list[Place]:
        """Write this worker's file, to the disk; where everything lies in it."""
        writer = _Writer(folder, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(self.rank == 0)
        plan = writer.prepare_global_plan([self.plan(self.rank)] * self.workers)[self.rank]
        results = writer.write_data(plan, _Source(self)).wait()
        self._written = results[0]
        return [
            [
                result.index.fqn,
                list(result.index.offset) if result.index.offset is not None else None,
                result.size_in_bytes,
                result.storage_data.relative_path,
                result.storage_data.offset,
                result.storage_data.length,
            ]
            for result in results
        ]

    def write_index(self, folder: Path, places: Iterable[Place]) -> None:
        """Write the index of all workers' files, to the disk, after `write`."""
        writer = _Writer(folder, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(True)
        _, index = create_default_global_save_plan([self.plan(rank) for rank in range(self.workers)])
        results = []
        for key, offset, size, file, start, length in places:
            # torch has no public name for what it keeps of a place
            lies = replace(self._written.storage_data, relative_path=file, offset=start, length=length)
            results.append(WriteResult(MetadataIndex(key, offset), size, lies))
        writer.finish(index, [results])


class _Writer(FileSystemWriter):
    """Equal states give equal files: the index tells neither the folder nor a random number."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class _Source(DefaultSavePlanner):
    """Gives the writer what a part holds."""

    def __init__(self, part: Part) -> None:
        super().__init__(flatten_state_dict=False)
        self._part = part

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._part.said)
        if write_item.type == WriteItemType.SHARD:
            return self._part.own[write_item.index.fqn].unsqueeze(0)
        return self._part.common[write_item.index.fqn]


class Stacked:
    """Reads what all parts together hold.

    Raises:
        Exception: whatever unpickling raises: verify the files before.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        self._index = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._index, True)

    @property
    def keys(self) -> list[str]:
        """Of all tensors."""
        return [key for key, kept in self._index.state_dict_metadata.items() if isinstance(kept, TensorStorageMetadata)]

    def common(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """What all workers share."""
        return self._read({key: self._size(key) for key in keys}, None)

    def rows(self, keys: Iterable[str], rank: int) -> dict[str, Tensor]:
        """What a worker had for itself."""
        found = self._read({key: torch.Size([1, *self._size(key)[1:]]) for key in keys}, rank)
        return {key: row[0] for key, row in found.items()}

    def said(self, rank: int) -> Any:
        """What a worker said beside tensors: numbers, text, containers and tensors, no code."""
        target = _Target({})
        index = MetadataIndex(f"{OBJECT}/{rank}")
        none = torch.Size([])
        item = ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
        self._reader.read_data(LoadPlan([item]), target).wait()
        return target.said

    def _size(self, key: str) -> torch.Size:
        kept = self._index.state_dict_metadata[key]
        assert isinstance(kept, TensorStorageMetadata)
        return kept.size

    def _read(self, sizes: dict[str, torch.Size], rank: int | None) -> dict[str, Tensor]:
        found, items = {}, []
        for key, size in sizes.items():
            kept = self._index.state_dict_metadata[key]
            assert isinstance(kept, TensorStorageMetadata)
            found[key] = torch.empty(size, dtype=kept.properties.dtype, device="cpu")
            start = torch.Size([0] * len(size))
            place = MetadataIndex(key, start if rank is None else torch.Size([rank, *start[1:]]))
            items.append(ReadItem(LoadItemType.TENSOR, MetadataIndex(key), start, place, start, size))
        self._reader.read_data(LoadPlan(items), _Target(found)).wait()
        return found


class _Target(DefaultLoadPlanner):
    """Takes what the reader finds."""

    said: Any = None

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self._tensors[read_item.dest_index.fqn]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.said = torch.load(value, map_location="cpu", weights_only=True)
