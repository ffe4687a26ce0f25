"""From text to tokens: bytes, or a tokenizer on this machine."""

from collections.abc import Sequence
from typing import Any, Protocol

from dlion.train.data.sets import expanded
from dlion.train.optional import Refused, reading, transformers_for


class Encoder(Protocol):
    """`vocabulary` is the number of token ids, `end` the one that ends a document, `begin` what a text starts with."""

    @property
    def name(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def begin(self) -> tuple[int, ...]: ...

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without any that begin or end it."""


class Bytes:
    """UTF-8 bytes, and one more token that ends a document."""

    name = "bytes"
    vocabulary = 257
    end = 256
    begin: tuple[int, ...] = ()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


class Pretrained:
    """A tokenizer of `transformers` from a folder, or the `tokenizer.json` of one."""

    def __init__(self, place: str, tokenizer: Any) -> None:
        self.name = place
        self._tokenizer = tokenizer
        self.vocabulary = len(tokenizer)
        end = tokenizer.eos_token_id
        if end is None:
            raise Refused(f"the tokenizer in {place} has no token that ends a text (eos_token)")
        self.end: int = end
        begin = tokenizer.bos_token_id
        # Whether a text begins with that token is the tokenizer's own decision: LLaMA's does, GPT-2's does not.
        self.begin: tuple[int, ...] = (begin,) if tokenizer("").input_ids[:1] == [begin] else ()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:  # a batch of none is more than transformers can take
            return []
        with reading(f"a text, by the tokenizer in {self.name},"):
            found: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
        return found


# What published tokenizers call the token that ends a text, where only a tokenizer.json is at hand.
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]")


def encoder(place: str | None) -> Encoder:
    """The tokenizer in the folder or `tokenizer.json` at `place`; None: bytes.

    Raises: ValueError: nothing there, or nothing that can be read.
    """
    if place is None:
        return Bytes()
    path = expanded(place)
    if not path.exists():
        raise ValueError(f"no tokenizer at {place}: give a folder of transformers, or a tokenizer.json")
    transformers = transformers_for(f"the tokenizer {place}")
    with reading(f"the tokenizer in {place}"):
        if path.is_file():
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
            known = tokenizer.get_vocab()
            ends = [name for name in _ENDS if name in known]
            tokenizer.add_special_tokens({"eos_token": ends[0]} if ends else {})
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        return Pretrained(place, tokenizer)
