"""Answers to instructions: prediction of the answer's tokens alone."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from dlion.train import streams
from dlion.train.data import DataInfo
from dlion.train.data.instructions import Example, Instructions
from dlion.train.judging import IGNORED, at_once, judge, judged
from dlion.train.parts import part


@dataclass(frozen=True, eq=False)
class InstructTask:
    """Prediction of the answers of `examples`; batches are i64[size, longest] twice, targets one further on.

    Inputs are padded on the right; targets of prompts and padding are -100 and count for nothing. A worker goes through
    all examples in an order of its own before it sees one again.
    """

    name: str
    examples: Instructions
    default_model: str
    metric: str | None = None

    @property
    def info(self) -> DataInfo:
        return self.examples.info

    @property
    def vocabulary(self) -> int:
        return self.examples.vocabulary

    @property
    def context(self) -> int:
        return self.examples.context

    def batch(
        self, *, seed: int, rank: int, workers: int, step: int, size: int, iid: bool = True
    ) -> tuple[Tensor, Tensor]:
        total = len(self.examples.train)
        first, last = (0, total) if iid else part(total, rank, workers)
        if first == last:
            raise ValueError(f"{total:,} examples cannot be cut into {workers:,} parts; use fewer workers or --iid")
        at = first + streams.shuffled_positions(seed, rank, step, size, last - first)
        return self._padded([self.examples.train[index] for index in at])

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def evaluate(self, model: nn.Module, *, rank: int, workers: int, device: torch.device) -> Tensor:
        result = torch.zeros(3, dtype=torch.float64)
        share = self.examples.valid[rank::workers]
        size = at_once(self.context, self.vocabulary)
        with judged(model):
            for begin in range(0, len(share), size):
                inputs, targets = self._padded(share[begin : begin + size])
                logits = model(inputs.to(device)).float().cpu()
                result += judge(logits.flatten(0, 1), targets.flatten())
        return result

    def _padded(self, examples: list[Example]) -> tuple[Tensor, Tensor]:
        rows = [torch.tensor([*one.prompt, *one.answer]) for one in examples]
        marked = [torch.tensor([*[IGNORED] * len(one.prompt), *one.answer]) for one in examples]
        inputs = pad_sequence([row[:-1] for row in rows], batch_first=True, padding_value=self.examples.end)
        targets = pad_sequence([row[1:] for row in marked], batch_first=True, padding_value=IGNORED)
        return inputs, targets
