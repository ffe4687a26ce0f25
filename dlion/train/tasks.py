"""Tasks: which samples a worker trains on at a step, what its loss is, and how a model is judged."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dlion.train import streams
from dlion.train.augment import crop_and_flip
from dlion.train.data import DataInfo, ImageSet, TextSet
from dlion.train.data.cifar import load_cifar10
from dlion.train.data.fashion import load_fashion
from dlion.train.data.text import load_text

TASKS: tuple[str, ...] = ("fashion-mnist", "cifar10", "text")
CONTEXT = 128
EVALUATED_WINDOWS = 256
_EVALUATION_BATCH = 250
_EVALUATION_LOGITS = 2**20  # 4 MB of logits at a time: 32 windows of bytes, one of GPT-2 tokens


class Task(Protocol):
    """What the training loop needs to know about data; `ImageTask` and `TextTask` are the two kinds."""

    @property
    def name(self) -> str: ...
    @property
    def info(self) -> DataInfo: ...
    @property
    def default_model(self) -> str: ...
    @property
    def metric(self) -> str | None: ...

    def batch(
        self, *, seed: int, rank: int, workers: int, step: int, size: int, iid: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one worker at one step, on the CPU, ready for the model.

        A pure function of its arguments. Each worker has a stream of its own; with `iid` all draw from the
        whole training set, without it the set sorted by class (text: by file) is cut into `workers` parts and
        each draws from its own.

        Raises: ValueError: a worker's part is empty (text: shorter than a window).
        """

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over the batch in nats (per image, byte or token)."""

    def evaluate(self, model: nn.Module, *, rank: int, workers: int, device: torch.device) -> Tensor:
        """f64[3]: summed loss, correct predictions and count over this worker's share `valid[rank::workers]`.

        The sums of all workers over the summed count are the validation loss and accuracy. Puts the model in
        evaluation mode and back; no gradients. A worker beyond the number of samples returns zeros.
        """


def load_task(name: str, data: str | None = None) -> Task:
    """The task called `name` (one of `TASKS`) on the data at path `data`, or on its default data.

    Raises: ValueError: unknown name, or the data are missing or damaged.
    """
    if name == "fashion-mnist":
        return ImageTask(name, load_fashion(data), default_model="conv", normalisation=((0.286,), (0.353,)))
    if name == "cifar10":
        return ImageTask(name, load_cifar10(data), default_model="conv", normalisation=_CIFAR10, augment=crop_and_flip)
    if name == "text":
        return TextTask(name, load_text(data), default_model="gpt")
    near = difflib.get_close_matches(name, TASKS, n=2, cutoff=0.4)
    hint = f": did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(f"unknown task {name!r}{hint} (tasks: {', '.join(TASKS)})")


# Mean and standard deviation of the training pixels, per channel. Constants of the task, not of the data
# found, so that a model saved after training on one copy of a set means the same when it is evaluated on
# another.
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataclass(frozen=True, eq=False)
class ImageTask:
    """Classification of the images of `images`; batches are f32[size, c, h, w] and i64[size].

    normalisation: mean and standard deviation per channel, of pixels in 0..1. augment: applied to training
    batches (u8), given seed, rank and step.
    """

    name: str
    images: ImageSet
    default_model: str
    normalisation: tuple[tuple[float, ...], tuple[float, ...]]
    augment: Callable[..., Tensor] | None = None
    metric: str | None = "accuracy"

    @property
    def info(self) -> DataInfo:
        return self.images.info

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of an input."""
        channels, height, width = self.images.train_images.shape[1:]
        return channels, height, width

    @property
    def classes(self) -> int:
        return self.images.classes

    @cached_property
    def _by_class(self) -> Tensor:
        return torch.argsort(self.images.train_labels, stable=True)

    def batch(
        self, *, seed: int, rank: int, workers: int, step: int, size: int, iid: bool = True
    ) -> tuple[Tensor, Tensor]:
        total = len(self.images.train_labels)
        first, last = (0, total) if iid else _part(total, rank, workers)
        if first == last:
            raise ValueError(
                f"{total:,} training images cannot be cut into {workers:,} parts; use fewer workers or --iid"
            )
        index = first + torch.from_numpy(streams.shuffled_positions(seed, rank, step, size, last - first))
        if not iid:
            index = self._by_class[index]
        pixels = self.images.train_images[index]
        if self.augment is not None:
            pixels = self.augment(pixels, seed=seed, rank=rank, step=step)
        return self.normalise(pixels), self.images.train_labels[index]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs).float(), targets)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, *, rank: int, workers: int, device: torch.device) -> Tensor:
        result = torch.zeros(3, dtype=torch.float64)
        was_training = model.training
        model.eval()
        index = torch.arange(len(self.images.valid_labels))[rank::workers]
        for begin in range(0, len(index), _EVALUATION_BATCH):
            share = index[begin : begin + _EVALUATION_BATCH]
            logits = model(self.normalise(self.images.valid_images[share]).to(device)).float().cpu()
            result += _judge(logits, self.images.valid_labels[share])
        model.train(was_training)
        return result

    def normalise(self, pixels: Tensor) -> Tensor:
        """u8[n, c, h, w] of 0 to 255 -> f32[n, c, h, w]: what the model takes."""
        mean, deviation = (torch.tensor(numbers).view(-1, 1, 1) for numbers in self.normalisation)
        return (pixels.float() / 255 - mean) / deviation


@dataclass(frozen=True, eq=False)
class TextTask:
    """Prediction of each next byte (or token) of `text`; batches are i64[size, context] twice, targets one
    further on.

    Windows are drawn with replacement, at any offset. `evaluate` judges `evaluated` windows at even distances
    over the validation data, always the same, since all of them would take longer than training does.
    """

    name: str
    text: TextSet
    default_model: str
    context: int = CONTEXT
    metric: str | None = None

    def __post_init__(self) -> None:
        for part, tokens in (("training", self.text.train), ("validation", self.text.valid)):
            if len(tokens) <= self.context:
                raise ValueError(
                    f"{self.text.name} has {len(tokens):,} {self.text.unit}s of {part} data; "
                    f"at least {self.context + 1} are needed for one window: give a longer text"
                )

    @property
    def info(self) -> DataInfo:
        windows = (len(self.text.train) - 1) // self.context
        judged = f"validation on {self.evaluated:,} fixed windows of {self.context} {self.text.unit}s"
        note = f"{self.text.note}; {judged}"
        return DataInfo(self.text.name, self.text.sha256, note, windows, self.evaluated)

    @property
    def vocabulary(self) -> int:
        return self.text.vocabulary

    @property
    def evaluated(self) -> int:
        """Number of windows that `evaluate` looks at."""
        return min(EVALUATED_WINDOWS, (len(self.text.valid) - 1) // self.context)

    def batch(
        self, *, seed: int, rank: int, workers: int, step: int, size: int, iid: bool = True
    ) -> tuple[Tensor, Tensor]:
        total = len(self.text.train)
        first, last = (0, total) if iid else _part(total, rank, workers)
        starts = last - first - self.context
        if starts < 1:
            raise ValueError(
                f"{total:,} {self.text.unit}s of text cannot be cut into {workers:,} parts of more than "
                f"{self.context}; use fewer workers or --iid"
            )
        offsets = first + streams.below(starts, streams.OFFSETS, seed, rank, step, count=size)
        return self._windows(self.text.train, offsets)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, *, rank: int, workers: int, device: torch.device) -> Tensor:
        result = torch.zeros(3, dtype=torch.float64)
        spread = len(self.text.valid) - self.context - 1
        offsets = np.arange(rank, self.evaluated, workers) * spread // max(self.evaluated - 1, 1)
        was_training = model.training
        model.eval()
        at_once = max(_EVALUATION_LOGITS // (self.context * self.vocabulary), 1)
        for begin in range(0, len(offsets), at_once):
            inputs, targets = self._windows(self.text.valid, offsets[begin : begin + at_once])
            logits = model(inputs.to(device)).float().cpu()
            result += _judge(logits.flatten(0, 1), targets.flatten())
        model.train(was_training)
        return result

    def _windows(
        self, tokens: npt.NDArray[np.unsignedinteger], offsets: npt.NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        found = tokens[offsets[:, None] + np.arange(self.context + 1)].astype(np.int64)
        if found.size and found.max() >= self.vocabulary:
            raise ValueError(
                f"{self.text.name} holds token {found.max()}; ids of 0 to {self.vocabulary - 1} are allowed: "
                "is it a uint16 file of GPT-2 tokens?"
            )
        windows = torch.from_numpy(found)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _part(total: int, rank: int, workers: int) -> tuple[int, int]:
    return rank * total // workers, (rank + 1) * total // workers


def _judge(logits: Tensor, targets: Tensor) -> Tensor:
    summed = cross_entropy(logits, targets, reduction="sum")
    correct = (logits.argmax(1) == targets).sum()
    return torch.stack([summed.double(), correct.double(), torch.tensor(float(len(targets)), dtype=torch.float64)])
