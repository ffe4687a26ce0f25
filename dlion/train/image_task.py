"""Classification of images, held in memory or decoded when they are drawn."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dlion.train import streams
from dlion.train.ahead import Ahead
from dlion.train.augment import Augmentation, mixed
from dlion.train.data import DataInfo
from dlion.train.judging import judge, judged
from dlion.train.parts import part

_EVALUATION_BATCH = 250


class Images(Protocol):
    """Labelled images of one size: `ImageSet` has them in memory, `ImageFolder` decodes them."""

    @property
    def info(self) -> DataInfo: ...
    @property
    def classes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def train_labels(self) -> Tensor: ...
    @property
    def valid_labels(self) -> Tensor: ...

    def training(self, index: Tensor, *, seed: int, rank: int, step: int) -> Tensor:
        """u8[n, c, h, w] of i64[n]; what is random about them is a function of (seed, rank, step)."""

    def validation(self, index: Tensor) -> Tensor:
        """u8[n, c, h, w] of i64[n]."""


@dataclass(frozen=True, eq=False)
class ImageTask:
    """Classification of the images of `images`; batches are f32[size, c, h, w] and i64[size] (with mixup the targets
    are shares, f32[size, classes]).

    normalisation: mean and standard deviation per channel, of pixels in 0..1. augment: applied in turn to training
    batches (u8), given seed, rank and step. mixup: both parameters of the Beta distribution of MixUp. ahead: where
    pixels take long to make; None makes them when they are asked for.
    """

    name: str
    images: Images
    default_model: str
    normalisation: tuple[tuple[float, ...], tuple[float, ...]]
    augment: tuple[Augmentation, ...] = ()
    mixup: float | None = None
    ahead: Ahead | None = None
    metric: str | None = "accuracy"

    @property
    def info(self) -> DataInfo:
        return self.images.info

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of an input."""
        return self.images.shape

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
        first, last = (0, total) if iid else part(total, rank, workers)
        if first == last:
            raise ValueError(
                f"{total:,} training images cannot be cut into {workers:,} parts; use fewer workers or --iid"
            )

        def drawn(at: int) -> Tensor:
            index = first + torch.from_numpy(streams.shuffled_positions(seed, rank, at, size, last - first))
            return index if iid else self._by_class[index]

        index = drawn(step)
        if self.ahead is None:
            pixels = self._pixels(index, seed, rank, step)
        else:
            pixels = self.ahead.take(self._pixels, index, lambda: drawn(step + 1), seed, rank, step)
        inputs, labels = self.normalise(pixels), self.images.train_labels[index]
        if self.mixup is None:
            return inputs, labels
        return mixed(inputs, labels, self.classes, self.mixup, seed=seed, rank=rank, step=step)

    def _pixels(self, index: Tensor, seed: int, rank: int, step: int) -> Tensor:
        """u8[n, c, h, w] of i64[n], augmented."""
        pixels = self.images.training(index, seed=seed, rank=rank, step=step)
        for augment in self.augment:
            pixels = augment(pixels, seed=seed, rank=rank, step=step)
        return pixels

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs).float(), targets)

    def evaluate(self, model: nn.Module, *, rank: int, workers: int, device: torch.device) -> Tensor:
        result = torch.zeros(3, dtype=torch.float64)
        index = torch.arange(len(self.images.valid_labels))[rank::workers]
        with judged(model):
            for begin in range(0, len(index), _EVALUATION_BATCH):
                share = index[begin : begin + _EVALUATION_BATCH]
                logits = model(self.normalise(self.images.validation(share)).to(device)).float().cpu()
                result += judge(logits, self.images.valid_labels[share])
        return result

    def normalise(self, pixels: Tensor) -> Tensor:
        """u8[n, c, h, w] of 0 to 255 -> f32[n, c, h, w]: what the model takes."""
        mean, deviation = (torch.tensor(numbers).view(-1, 1, 1) for numbers in self.normalisation)
        return (pixels.float() / 255 - mean) / deviation
