"""Runs of tokens: files as nanoGPT and llm.c write them, and the windows that a model trains on."""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlion.train.data.sets import TextSet, Tokens

GPT2_VOCABULARY = 50257
LLAMA3_VOCABULARY = 128256
# llm.c begins a file with 256 numbers (int32): one of these, a version, the count of tokens.
HEADER_BYTES = 1024
FORMATS: dict[int, tuple[str, str, int]] = {
    20240520: ("<u2", "GPT-2", GPT2_VOCABULARY),
    20240801: ("<u4", "Llama 3", LLAMA3_VOCABULARY),
}
VALID_SHARE = 10  # one part in ten is for validation
_SAMPLED_ABOVE = 2**30
_BLOCK = 2**20

Array = npt.NDArray[Any]


class Joined:
    """Several runs as one, each left where it is; a window may begin in one and end in the next."""

    def __init__(self, runs: Sequence[Array]) -> None:
        self._runs = [run for run in runs if len(run)]
        self._ends = np.cumsum([len(run) for run in self._runs])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, at: Any) -> Array:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            assert step == 1
            return self._between(start, max(start, stop))
        positions = np.asarray(at)
        flat = positions.ravel()
        owners = np.searchsorted(self._ends, flat, side="right")
        found = np.empty(len(flat), np.int64)
        for owner in np.unique(owners):
            mine = owners == owner
            run = self._runs[owner]
            found[mine] = run[flat[mine] - (self._ends[owner] - len(run))]
        return found.reshape(positions.shape)

    def _between(self, start: int, stop: int) -> Array:
        parts = []
        while start < stop:
            owner = bisect_right(self._ends, start)
            first = int(self._ends[owner]) - len(self._runs[owner])
            parts.append(self._runs[owner][start - first : stop - first])
            start += len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def windows(tokens: Tokens, offsets: Array, context: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """i64[n, context] twice: the windows that begin at i64[n] `offsets`, and the same one token further on.

    Raises: ValueError: a token is not below `vocabulary`.
    """
    found = tokens[offsets[:, None] + np.arange(context + 1)].astype(np.int64)
    if found.size and found.max() >= vocabulary:
        raise ValueError(
            f"the text holds token {found.max()}; ids of 0 to {vocabulary - 1} are allowed: "
            "is it a file of such tokens, written by nanoGPT or llm.c?"
        )
    pairs = torch.from_numpy(found)
    return pairs[:, :-1].contiguous(), pairs[:, 1:].contiguous()


def read_token_files(place: Path) -> TextSet | None:
    """The token files at `place`, mapped; None when there are none.

    A `.bin` file, or a folder with `train.bin` or llm.c's `*_train*.bin`, which are read in the order of their names.
    `val.bin` or `*_val*.bin` beside them is for validation, else the last tenth. A file begins with llm.c's header, or
    is a run of uint16 GPT-2 tokens as nanoGPT writes them.

    Raises: ValueError: a file is cut short or of an unknown kind.
    """
    train = _named(place, "train") if place.is_dir() else [place] if place.suffix == ".bin" and place.is_file() else []
    if not train:
        return None
    folder = train[0].parent
    valid = _named(folder, "val") if train == _named(folder, "train") else []
    kinds = {path: _map(path) for path in [*train, *valid]}
    (kind, vocabulary), *others = {(kind, vocabulary) for _, kind, vocabulary in kinds.values()}
    if others:
        raise ValueError(f"the token files in {folder} are of different kinds ({kind}, {others[0][0]}): take one kind")
    whole = Joined([kinds[path][0] for path in train]) if len(train) > 1 else kinds[train[0]][0]
    files = f"{train[0]} and {len(train) - 1} more files" if len(train) > 1 else str(train[0])
    if valid:
        kept: Tokens = Joined([kinds[path][0] for path in valid]) if len(valid) > 1 else kinds[valid[0]][0]
        how = f"{files} to train ({len(whole):,} {kind} tokens), {valid[0].name} to validate ({len(kept):,})"
    else:
        cut = len(whole) - len(whole) // VALID_SHARE
        whole, kept = whole[:cut], whole[cut:]
        how = f"{files}: the first {cut:,} {kind} tokens to train, the last {len(kept):,} to validate"
    sha, sampled = digest_of(whole, kept)
    return TextSet(train[0].name, sha, how + sampled, "token", vocabulary, whole, kept)


def _named(folder: Path, part: str) -> list[Path]:
    plain = folder / f"{part}.bin"
    return [plain] if plain.is_file() else sorted(path for path in folder.glob(f"*_{part}*.bin") if path.is_file())


def _map(path: Path) -> tuple[Array, str, int]:
    """The tokens of a file, what they are called, and how many ids there are."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES), np.uint8)
        numbers = header[: len(header) // 4 * 4].view("<i4")
        if len(numbers) and int(numbers[0]) in FORMATS:  # a run of GPT-2 tokens cannot begin with these
            if size < HEADER_BYTES or int(numbers[2]) < 1:
                raise ValueError(
                    f"{path} has a header of llm.c that is cut short or tells of no tokens; fetch it again"
                )
            dtype, kind, vocabulary = FORMATS[int(numbers[0])]
            expected = HEADER_BYTES + int(numbers[2]) * np.dtype(dtype).itemsize
            if size != expected:
                raise ValueError(f"{path} holds {size:,} bytes where its header asks for {expected:,}; fetch it again")
            return np.memmap(path, dtype, mode="r", offset=HEADER_BYTES), kind, vocabulary
        if size == 0 or size % 2:
            raise ValueError(
                f"{path} holds {size:,} bytes; a token file is a run of uint16 numbers, as nanoGPT writes them"
            )
        return np.memmap(path, "<u2", mode="r"), "GPT-2", GPT2_VOCABULARY
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions") from None


def digest_of(*parts: Tokens) -> tuple[str, str]:
    """SHA-256 of the parts, and what to add to the note: above 1 Gi tokens only sampled blocks count, to start
    within a second.
    """
    sha = hashlib.sha256()
    sampled = sum(len(part) for part in parts) > _SAMPLED_ABOVE // 2
    for part in parts:
        if sampled:
            sha.update(str(len(part)).encode())
            starts = [int(start) for start in np.linspace(0, max(len(part) - _BLOCK, 0), 64)]
        else:
            starts = list(range(0, len(part), _BLOCK))
        for start in starts:
            sha.update(np.ascontiguousarray(part[start : start + _BLOCK]).data)
    return sha.hexdigest(), "; its SHA-256 is of 64 sampled blocks of each part" if sampled else ""
