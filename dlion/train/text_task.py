"""Prediction of each next token of a run of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dlion.train import streams
from dlion.train.data import DataInfo, TextSet
from dlion.train.data.tokens import windows
from dlion.train.judging import EVALUATED_WINDOWS, evaluated_windows, judge_text
from dlion.train.parts import part

CONTEXT = 128


@dataclass(frozen=True, eq=False)
class TextTask:
    """Prediction of each next byte (or token) of `text`; batches are i64[size, context] twice, targets one
    further on.

    Windows are drawn with replacement, at any offset. `evaluate` judges `evaluated` windows, `most` at most, at even
    distances over the validation data, always the same.
    """

    name: str
    text: TextSet
    default_model: str
    context: int = CONTEXT
    most: int = EVALUATED_WINDOWS
    metric: str | None = None

    def __post_init__(self) -> None:
        for kind, tokens in (("training", self.text.train), ("validation", self.text.valid)):
            if len(tokens) <= self.context:
                raise ValueError(
                    f"{self.text.name} has {len(tokens):,} {self.text.unit}s of {kind} data; "
                    f"at least {self.context + 1} are needed for one window: give a longer text"
                )

    @property
    def info(self) -> DataInfo:
        whole = (len(self.text.train) - 1) // self.context
        judged = f"validation on {self.evaluated:,} fixed windows of {self.context} {self.text.unit}s"
        note = f"{self.text.note}; {judged}"
        return DataInfo(self.text.name, self.text.sha256, note, whole, self.evaluated)

    @property
    def vocabulary(self) -> int:
        return self.text.vocabulary

    @property
    def evaluated(self) -> int:
        """Number of windows that `evaluate` looks at."""
        return evaluated_windows(len(self.text.valid), self.context, self.most)

    def batch(
        self, *, seed: int, rank: int, workers: int, step: int, size: int, iid: bool = True
    ) -> tuple[Tensor, Tensor]:
        total = len(self.text.train)
        first, last = (0, total) if iid else part(total, rank, workers)
        starts = last - first - self.context
        if starts < 1:
            raise ValueError(
                f"{total:,} {self.text.unit}s of text cannot be cut into {workers:,} parts of more than "
                f"{self.context}; use fewer workers or --iid"
            )
        offsets = first + streams.below(starts, streams.OFFSETS, seed, rank, step, count=size)
        return windows(self.text.train, offsets, self.context, self.vocabulary)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, *, rank: int, workers: int, device: torch.device) -> Tensor:
        how = (self.context, self.vocabulary, self.evaluated)
        return judge_text(model, self.text.valid, *how, rank=rank, workers=workers, device=device)
