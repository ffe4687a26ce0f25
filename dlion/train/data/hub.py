"""Text of a Hugging Face data set: on disk with random access, or as a stream."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlion.train.data.encoders import Encoder, encoder
from dlion.train.data.sets import DataInfo, TextSet, Tokens, expanded
from dlion.train.data.tokens import VALID_SHARE, Joined, digest_of
from dlion.train.legal import shown
from dlion.train.optional import Refused, data_sets, reading

VALID_NAMES = ("validation", "valid", "val", "test")
SHUFFLED = 10_000  # rows among which a stream's next one is drawn
_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
_HOW = "give a folder of `save_to_disk`, a .jsonl, .json, .parquet, .csv or .txt file, or a name on the hub [:config]"


def hub_text(data: str | None, column: str | None, tokenizer: str | None) -> TextSet:
    """The text column of a data set, tokenised once and kept by `datasets` in its own cache; a token ends each row.

    The split validation, valid, val or test is for validation, else the last tenth of the tokens.

    Raises: ValueError: no such data, no such column, or `datasets` is not installed.
    """
    encode, column = encoder(tokenizer), column or "text"
    train, valid = _splits(data, stream=False)
    runs: Tokens = _tokenised(train, column, encode, data)
    if valid is not None:
        kept: Tokens = _tokenised(valid, column, encode, data)
        how = "its validation split to validate"
    else:
        cut = len(runs) - len(runs) // VALID_SHARE
        runs, kept = runs[:cut], runs[cut:]
        how = "the last tenth to validate"
    sha, sampled = digest_of(runs, kept)
    note = (
        f"column {column} of the data set {data} as {encode.name}: {len(runs):,} tokens to train, "
        f"{len(kept):,} to validate ({how}){sampled}"
    )
    return TextSet(str(data), sha, note, "token", encode.vocabulary, runs, kept)


@dataclass(frozen=True, eq=False)
class StreamedText:
    """Text that is read from its beginning: `rows` gives the documents of a worker as tokens, in a fixed order.

    valid: the tokens held back for validation. info: `train_size` 0, since nobody knows it.
    """

    info: DataInfo
    vocabulary: int
    valid: npt.NDArray[np.int64]
    train: Any
    column: str
    encode: Encoder

    def rows(self, seed: int, rank: int, workers: int) -> Iterator[list[int]]:
        """Every document of the stream once in `workers`, shuffled within a buffer, again and again.

        Worker r of N takes rows r, r + N, r + 2N, ... of an order that follows from the seed and the round.
        """
        round_ = 0
        while True:
            shuffled = self.train.shuffle(seed=seed + round_, buffer_size=SHUFFLED)
            found = False
            for number, row in enumerate(rows_of(shuffled, self.info.name)):
                if number % workers == rank:
                    found = True
                    yield _document(row, self.column, self.encode)
            if not found:
                raise ValueError(
                    f"{self.info.name} has fewer rows to train on than there are workers ({workers}), beside those "
                    "held back to validate: give a longer text, or a smaller --eval-windows"
                )
            round_ += 1


def streamed_text(data: str | None, column: str | None, tokenizer: str | None, hold_back: int) -> StreamedText:
    """The same data as `hub_text`, read as a stream; nothing is stored.

    More than `hold_back` tokens for validation come from the validation split, else from the first rows of the
    training split, which are then left out of training.

    Raises: ValueError: as `hub_text`; the data are too short.
    """
    encode, column = encoder(tokenizer), column or "text"
    train, valid = _splits(data, stream=True)
    kept: list[int] = []
    taken = 0
    for row in rows_of(train if valid is None else valid, str(data)):
        if len(kept) > hold_back:
            break
        kept += _document(row, column, encode)
        taken += 1
    if valid is None:
        train = train.skip(taken)
    tokens = np.array(kept, np.int64)
    where = f"the first {taken} rows" if valid is None else "the validation split"
    sha, _ = digest_of(tokens)
    note = (
        f"column {column} of the data set {data} as {encode.name}, read as a stream and not stored: {len(tokens):,} "
        f"tokens of {where} to validate; its SHA-256 is of those"
    )
    return StreamedText(DataInfo(str(data), sha, note, 0, 0), encode.vocabulary, tokens, train, column, encode)


def open_data_set(data: str, stream: bool) -> Any:
    """A `datasets` data set, or a dictionary of its splits.

    Raises: ValueError: nothing there, or it cannot be read.
    """
    datasets = data_sets()
    path = expanded(data)
    if path.exists() and not path.is_dir() and path.suffix not in _KINDS:
        raise ValueError(f"--data {data} is no data set: {_HOW}")
    with reading(f"the data set {data}", _HOW):
        if path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
            return _streamed(datasets.load_from_disk(str(path))) if stream else datasets.load_from_disk(str(path))
        if path.is_file():
            return datasets.load_dataset(_KINDS[path.suffix], data_files=str(path), streaming=stream)
        name, _, config = (data, "", "") if path.is_dir() else data.partition(":")
        return datasets.load_dataset(name, config or None, streaming=stream)


def rows_of(found: Any, data: str) -> Iterator[Any]:
    """The rows of a data set or a stream, one after another.

    Raises: ValueError: one cannot be read.
    """
    rows = iter(found)
    while True:
        with reading(f"a row of the data set {data}"):
            try:
                row = next(rows)
            except StopIteration:
                return
        yield row


def _streamed(found: Any) -> Any:
    if hasattr(found, "keys"):
        return {name: found[name].to_iterable_dataset() for name in found}
    return found.to_iterable_dataset()


def _splits(data: str | None, stream: bool) -> tuple[Any, Any]:
    if data is None:
        raise ValueError(f"task hf-text needs --data: {_HOW}")
    found = open_data_set(data, stream)
    if not hasattr(found, "keys"):
        return found, None
    if "train" not in found:
        raise ValueError(f"the data set {data} has no split called train, only {shown(', '.join(found))}")
    return found["train"], next((found[name] for name in VALID_NAMES if name in found), None)


def _tokenised(rows: Any, column: str, encode: Encoder, data: str | None) -> Joined:
    """Every row's tokens and the one that ends it, left in the memory-mapped columns of `datasets`."""
    _check_column(rows.column_names, column)

    def encoded(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        if strange := [text for text in batch[column] if not isinstance(text, str)]:
            raise Refused(_no_text(strange[0], column))
        return {"ids": [[*ids, encode.end] for ids in encode(batch[column])]}

    datasets = data_sets()
    ids = datasets.Features({"ids": datasets.List(datasets.Value("int32"))})
    with reading(f"the text of the data set {data}"):
        done = rows.map(encoded, batched=True, remove_columns=rows.column_names, features=ids, desc="tokenising")
        return Joined([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in done.data.column("ids").chunks])


def _document(row: dict[str, Any], column: str, encode: Encoder) -> list[int]:
    _check_column(list(row), column)
    if not isinstance(row[column], str):
        raise ValueError(_no_text(row[column], column))
    return [*encode([row[column]])[0], encode.end]


def _check_column(columns: list[str], column: str) -> None:
    if column not in columns:
        known = shown(", ".join(map(str, columns)))
        raise ValueError(f"the data set has no column {column!r}, only {known}: name one with --column")


def _no_text(found: Any, column: str) -> str:
    return f"a row has {shown(found)} in the column {shown(column)}, where text is needed: leave such rows out"
