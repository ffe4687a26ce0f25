"""Prediction of each next token of a stream, which has no random access."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dlion.train.data import DataInfo
from dlion.train.data.hub import StreamedText
from dlion.train.judging import EVALUATED_WINDOWS, evaluated_windows, judge_text


@dataclass
class _Place:
    """How far one worker has read: windows given out, and the tokens left over from the last document."""

    rows: Iterator[list[int]]
    window: int = 0
    left: list[int] = field(default_factory=list)

    def next(self, context: int) -> list[int]:
        """The next `context` tokens and the one after them, which begins the next window."""
        while len(self.left) <= context:
            self.left += next(self.rows)
        found = self.left[: context + 1]
        del self.left[:context]
        self.window += 1
        return found


@dataclass(frozen=True, eq=False)
class StreamTask:
    """Prediction of each next token of `text`; batches are i64[size, context] twice, targets one further on.

    A worker's windows follow one another in its own stream of documents, and step s of batches of one size takes
    windows s*size to (s+1)*size - 1. So a batch is a function of (seed, rank, workers, step, size) here too, but one
    that must be read up to: what is kept is each worker's place in its stream, in memory and in no checkpoint. A step
    behind that place, as the first one of a resumed run, is reached by reading from the beginning again.
    """

    name: str
    text: StreamedText
    default_model: str
    context: int
    most: int = EVALUATED_WINDOWS
    metric: str | None = None
    _places: dict[tuple[int, ...], _Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.text.valid) <= self.context:
            raise ValueError(
                f"{self.text.info.name} has {len(self.text.valid):,} tokens of validation data; at least "
                f"{self.context + 1} are needed for one window: give a smaller --context"
            )

    @property
    def info(self) -> DataInfo:
        return replace(self.text.info, valid_size=evaluated_windows(len(self.text.valid), self.context, self.most))

    @property
    def vocabulary(self) -> int:
        return self.text.vocabulary

    def batch(
        self, *, seed: int, rank: int, workers: int, step: int, size: int, iid: bool = True
    ) -> tuple[Tensor, Tensor]:
        if not iid:
            raise ValueError("--no-iid needs data with random access: leave out --stream")
        key = (os.getpid(), seed, rank, workers)  # a fork does not go on where its launcher, with its files, had got to
        place = self._places.pop(key, None)  # put back when it has been read without a fault
        if place is None or place.window > step * size:
            place = _Place(self.text.rows(seed, rank, workers))
        for _ in range(place.window, step * size):
            place.next(self.context)
        pairs = torch.tensor([place.next(self.context) for _ in range(size)])
        self._places[key] = place
        return pairs[:, :-1].contiguous(), pairs[:, 1:].contiguous()

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, *, rank: int, workers: int, device: torch.device) -> Tensor:
        how = (self.context, self.vocabulary, self.info.valid_size)
        return judge_text(model, self.text.valid, *how, rank=rank, workers=workers, device=device)
