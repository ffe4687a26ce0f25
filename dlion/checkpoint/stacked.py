"""Files of torch.distributed.checkpoint: what all workers share once, what each has for itself as T[rows, *shape].

Every process writes a file of its own, and reads the blocks that it wants: nothing is sent from one to another but
where each block lies, as JSON. The index is torch's own, which is a pickle: reading one of unknown origin runs its
code.
"""

import io
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import prod
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
    Metadata,
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
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from dlion.checkpoint.chunks import Chunk
from dlion.errors import CheckpointError

INDEX = ".metadata"
OBJECT = "worker"

# of what was written, in JSON: key, (dtype, shape of the whole tensor, offset and shape of the chunk) or None,
# bytes, file, first byte, length
Place = list[Any]
Block = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape

NOWHERE: Mapping[str, Chunk] = {}  # no tensor is sharded


def file_of(rank: int) -> str:
    """Where the part of a process lies."""
    return f"__{rank}_0.distcp"


def object_of(worker: int, shard: int) -> str:
    """Under which key lies what a process has to say beside tensors."""
    return f"{OBJECT}/{worker}/{shard}" if shard else f"{OBJECT}/{worker}"


class Part:
    """What one process writes: chunks of tensors, on the CPU, and what it has to say beside them.

    Args:
        rank: of the process among all that write.
        common: chunks of tensors that all workers share. own: of those that they do not, stacked.
        sharded: keys of the chunks that other processes may hold too: `leave_out` says which they write.
        shared: key, offset and checksum of all that is common, whoever writes it.
        said: bytes, under the key `speaker`.
    """

    def __init__(
        self,
        rank: int,
        common: dict[str, Chunk],
        own: dict[str, Chunk],
        sharded: set[str],
        shared: list[list[Any]],
        speaker: str,
        said: bytes,
    ) -> None:
        self.rank, self.shared, self.speaker, self.said = rank, shared, speaker, said
        self.chunks = dict(sorted((common | own).items()))
        self._alike, self._sharded = own.keys() | sharded, sharded

    @property
    def form(self) -> list[list[Any]]:
        """What must be equal in all processes, in JSON: key, shape and dtype of the tensors that all write of."""
        alike = [(key, chunk) for key, chunk in self.chunks.items() if key in self._alike]
        return [[key, list(chunk.size), str(chunk.values.dtype)] for key, chunk in alike]

    @property
    def held(self) -> list[list[Any]]:
        """Key and offset of the chunks that others may hold too, in JSON."""
        return [[key, list(chunk.offset)] for key, chunk in self.chunks.items() if key in self._sharded]

    def leave_out(self, keys: Collection[str]) -> None:
        """Others write these."""
        self.chunks = {key: chunk for key, chunk in self.chunks.items() if key not in keys}

    def write(self, folder: Path) -> list[Place]:
        """Write the file of this process, to the disk; where everything lies in it."""
        writer = _Writer(folder, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(self.rank == 0)
        facts = {
            key: [str(chunk.values.dtype), list(chunk.size), list(chunk.offset), list(chunk.shape)]
            for key, chunk in self.chunks.items()
            if not chunk.says_nothing
        }
        plan = SavePlan([_item(self.speaker, None), *(_item(key, fact) for key, fact in facts.items())])
        plan = writer.prepare_global_plan([plan] * (self.rank + 1))[self.rank]
        results = writer.write_data(plan, _Source(self)).wait()
        self._written = results[0]
        return [
            [
                result.index.fqn,
                facts.get(result.index.fqn),
                result.size_in_bytes,
                result.storage_data.relative_path,
                result.storage_data.offset,
                result.storage_data.length,
            ]
            for result in results
        ]

    def write_index(self, folder: Path, places: Iterable[Place]) -> None:
        """Write the index of all processes' files, to the disk, after `write`.

        Raises:
            CheckpointError: a part of a tensor was written by nobody.
        """
        writer = _Writer(folder, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(True)
        items, results = [], []
        for key, fact, size, file, start, length in places:
            items.append(_item(key, fact))
            # torch has no public name for what it keeps of a place
            lies = replace(self._written.storage_data, relative_path=file, offset=start, length=length)
            results.append(WriteResult(items[-1].index, size, lies))
        _, index = create_default_global_save_plan([SavePlan(items)])
        _check_whole(index)
        writer.finish(index, [results])


def _item(key: str, fact: list[Any] | None) -> WriteItem:
    """A thing that is written: a chunk, or what somebody says."""
    if fact is None:
        return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
    dtype, size, offset, shape = fact
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
    properties = TensorProperties(dtype=getattr(torch, dtype.removeprefix("torch.")))
    data = TensorWriteData(chunk, properties, torch.Size(size))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _check_whole(index: Metadata) -> None:
    for key, kept in index.state_dict_metadata.items():
        if isinstance(kept, TensorStorageMetadata):
            there = sum(prod(chunk.sizes) for chunk in kept.chunks)
            if there != prod(kept.size):
                raise CheckpointError(
                    f"{key} has {prod(kept.size)} elements and the ranks that save hold {there} of them: save with all "
                    "ranks that hold its shards, each part once"
                )


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
        return self._part.chunks[write_item.index.fqn].values


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

    @property
    def processes(self) -> int:
        """How many wrote it."""
        return sum(key.startswith(f"{OBJECT}/") for key in self._index.state_dict_metadata)

    def size(self, key: str) -> torch.Size:
        """The shape of a whole tensor, all rows of a stacked one."""
        return self._kept(key).size

    def common(self, keys: Iterable[str], here: Mapping[str, Chunk] = NOWHERE) -> dict[str, Tensor]:
        """What all workers share: of tensors in `here` the same block as that chunk, of others all."""
        return self._read({key: _block(here.get(key), self.size(key)) for key in keys})

    def rows(self, keys: Iterable[str], number: int, here: Mapping[str, Chunk] = NOWHERE) -> dict[str, Tensor]:
        """What lies in row `number` of stacked tensors: of those in `here` the same block as that chunk, else all."""
        blocks = {key: _block(here.get(key), self.size(key)[1:]) for key in keys}
        found = self._read({key: ((number, *offset), (1, *shape)) for key, (offset, shape) in blocks.items()})
        return {key: row[0] for key, row in found.items()}

    def said(self, worker: int, shard: int = 0) -> Any:
        """What a process said beside tensors: numbers, text, containers and tensors, no code."""
        target = _Target({})
        index = MetadataIndex(object_of(worker, shard))
        none = torch.Size([])
        item = ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
        self._reader.read_data(LoadPlan([item]), target).wait()
        return target.said

    def _kept(self, key: str) -> TensorStorageMetadata:
        kept = self._index.state_dict_metadata[key]
        assert isinstance(kept, TensorStorageMetadata)
        return kept

    def _read(self, blocks: dict[str, Block]) -> dict[str, Tensor]:
        """Those blocks of tensors, put together from the chunks that were saved."""
        found, items = {}, []
        for key, (offset, shape) in blocks.items():
            found[key] = torch.empty(shape, dtype=self._kept(key).properties.dtype, device="cpu")
            wanted = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
            parts = create_read_items_for_chunk_list(key, self._kept(key), [wanted])
            if sum(prod(part.lengths) for part in parts) != prod(shape):
                raise ValueError(f"{key} is not all there")
            items += parts
        self._reader.read_data(LoadPlan(items), _Target(found)).wait()
        return found


def _block(chunk: Chunk | None, size: torch.Size) -> Block:
    return (chunk.offset, chunk.shape) if chunk is not None else ((0,) * len(size), tuple(size))


class _Target(DefaultLoadPlanner):
    """Takes what the reader finds."""

    said: Any = None

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self._tensors[read_item.dest_index.fqn]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.said = torch.load(value, map_location="cpu", weights_only=True)
