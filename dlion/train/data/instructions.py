"""Instructions with their answers, tokenised for a language model."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlion.train.data.encoders import Encoder, encoder
from dlion.train.data.hub import VALID_NAMES, open_data_set, rows_of
from dlion.train.data.sets import DataInfo, expanded
from dlion.train.json_text import from_json
from dlion.train.legal import shown

CONTEXT = 512
VALID_SHARE = 20  # one row in twenty is for validation
# Names of the columns in published sets: instruction, what it is about (may be missing or empty), answer.
COLUMNS = (
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("prompt", "input", "completion"),
)
_HOW = (
    "give a .json or .jsonl file, or a Hugging Face data set, with the columns instruction, input, output (or "
    "instruction, context, response, or prompt, completion)"
)


@dataclass(frozen=True)
class Example:
    """A prompt and its answer as tokens; the answer ends with the token that ends a text."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, eq=False)
class Instructions:
    """Examples in the order of the data, cut to `context` tokens."""

    info: DataInfo
    vocabulary: int
    end: int
    context: int
    train: list[Example]
    valid: list[Example]


def load_instructions(data: str | None, tokenizer: str | None, context: int | None) -> Instructions:
    """The rows of `data` in tokens of the tokenizer (of --pretrained unless another is given).

    A data set's split validation, valid, val or test is for validation, else the twentieth of the rows whose content
    has the lowest SHA-256. Examples whose prompt fills the context are left out, and counted in the note.

    Raises: ValueError: no data, no tokenizer, other columns, or nothing left.
    """
    if data is None:
        raise ValueError(f"task instruct needs --data: {_HOW}")
    if tokenizer is None:
        raise ValueError("task instruct needs --pretrained, or --tokenizer: the folder of a model or of its tokenizer")
    context, encode = context or CONTEXT, encoder(tokenizer)
    rows, held_back = _rows(data)
    texts = [_texts(row, data) for row in rows]
    if not texts or held_back == []:
        raise ValueError(f"{data} has no rows to {'validate' if texts else 'train'}: {_HOW}")
    if held_back is None:
        by_hash = sorted(range(len(texts)), key=lambda at: (_sha(texts[at]), at))
        chosen = set(by_hash[: max(1, len(texts) // VALID_SHARE)])
        valid_texts = [text for at, text in enumerate(texts) if at in chosen]
        texts = [text for at, text in enumerate(texts) if at not in chosen]
    else:
        valid_texts = [_texts(row, data) for row in held_back]
    train, valid = (_examples(part, encode, context) for part in (texts, valid_texts))
    if not train or not valid:
        raise ValueError(f"{data} has {len(train)} examples to train and {len(valid)} to validate that fit --context")
    left_out = len(texts) + len(valid_texts) - len(train) - len(valid)
    sha = hashlib.sha256(json.dumps([texts, valid_texts]).encode()).hexdigest()
    note = f"instructions of {data}: {len(train):,} to train, {len(valid):,} to validate, at most {context} tokens" + (
        f"; {left_out:,} longer prompts left out" if left_out else ""
    )
    info = DataInfo(Path(data).name, sha, note, len(train), len(valid))
    return Instructions(info, encode.vocabulary, encode.end, context, train, valid)


def _rows(data: str) -> tuple[list[Any], list[Any] | None]:
    path = expanded(data)
    if path.is_file() and path.suffix in (".json", ".jsonl"):
        try:
            text = path.read_text("utf-8")
            lines = text.split("\n")  # splitlines() cuts at separators that JSON allows within a string
            rows = from_json(text) if path.suffix == ".json" else [from_json(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as {path.suffix[1:].upper()} ({error}): {_HOW}") from None
        if not isinstance(rows, list):
            raise ValueError(f"{path} holds no list of rows: {_HOW}")
        return rows, None
    found = open_data_set(data, stream=False)
    if not hasattr(found, "keys"):
        return list(rows_of(found, data)), None
    if "train" not in found:
        raise ValueError(f"the data set {data} has no split called train, only {', '.join(found)}")
    return list(rows_of(found["train"], data)), next(
        (list(rows_of(found[name], data)) for name in VALID_NAMES if name in found), None
    )


def _texts(row: Any, data: str) -> tuple[str, str]:
    """Prompt and answer of a row, in words."""
    if not isinstance(row, dict):
        raise ValueError(f"a row of {data} is {shown(row)} and no table of columns: {_HOW}")
    for instruction, about, answer in COLUMNS:
        if all(_is_text(text) for text in (row.get(instruction), row.get(about) or "", row.get(answer))):
            return prompt_of(row[instruction], row.get(about) or ""), row[answer]
    raise ValueError(
        f"a row of {data} has other columns, or no text in them ({shown(', '.join(map(str, row)))}): {_HOW}"
    )


def _is_text(value: Any) -> bool:
    """Whether it is text that UTF-8 has bytes for: JSON can name halves of letters."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def prompt_of(instruction: str, about: str) -> str:
    """What the model reads before its answer. The paper names no template; these are the headings in common use."""
    middle = f"### Input:\n{about}\n\n" if about else ""
    return f"### Instruction:\n{instruction}\n\n{middle}### Response:\n"


def _examples(texts: list[tuple[str, str]], encode: Encoder, context: int) -> list[Example]:
    # Together, and cut where the prompt alone ends: as a text that goes on is tokenised, also when questions are asked.
    prompts, both = encode([prompt for prompt, _ in texts]), encode([prompt + answer for prompt, answer in texts])
    whole = [
        Example([*encode.begin, *tokens[: len(prompt)]], [*tokens[len(prompt) :], encode.end])
        for prompt, tokens in zip(prompts, both, strict=True)
    ]
    # A window has context + 1 tokens: the inputs, and the target of the last of them.
    return [
        Example(one.prompt, one.answer[: context + 1 - len(one.prompt)]) for one in whole if len(one.prompt) <= context
    ]


def _sha(text: tuple[str, str]) -> bytes:
    return hashlib.sha256("\0".join(text).encode("utf-8", "surrogatepass")).digest()
