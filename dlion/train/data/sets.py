"""What a reader returns."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class DataInfo:
    """Which data a run used.

    name: as it should stand in a report, for example "Fashion-MNIST (subset)". sha256: digest of the content
    after decoding, so it does not depend on how the files were packed. note: one sentence for the user: what
    was used and where it came from. train_size, valid_size: number of images; for text, the training windows
    that do not overlap and the windows evaluated.
    """

    name: str
    sha256: str
    note: str
    train_size: int
    valid_size: int


@dataclass(frozen=True)
class ImageSet:
    """Labelled images: `train_images`, `valid_images` u8[n, channels, height, width]; labels i64[n] in
    0..classes-1.
    """

    info: DataInfo
    classes: int
    train_images: torch.Tensor
    train_labels: torch.Tensor
    valid_images: torch.Tensor
    valid_labels: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of an image."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    def training(self, index: torch.Tensor, *, seed: int, rank: int, step: int) -> torch.Tensor:
        """u8[n, c, h, w] of i64[n]; nothing about them is random."""
        return self.train_images[index]

    def validation(self, index: torch.Tensor) -> torch.Tensor:
        """u8[n, c, h, w] of i64[n]."""
        return self.valid_images[index]


class Tokens(Protocol):
    """A run of tokens with random access: an array, possibly a file, or several of them."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: Any) -> npt.NDArray[Any]:
        """By a slice, or by an array of positions of any shape."""


@dataclass(frozen=True)
class TextSet:
    """Two runs of tokens, u8[n] (bytes) or wider (token files, possibly memory-mapped), in order of the files.

    unit: what a token is called, "byte" or "token". vocabulary: number of token ids.
    """

    name: str
    sha256: str
    note: str
    unit: str
    vocabulary: int
    train: Tokens
    valid: Tokens


def image_set(name: str, note: str, train: "Split", valid: "Split") -> ImageSet:
    """Check two splits (images u8[n, c, h, w], labels u8[n]) against each other and put them together.

    Raises: ValueError: a split is empty, counts or image sizes differ, or there are fewer than two classes.
    """
    for part, split in (("training", train), ("validation", valid)):
        if len(split.images) == 0:
            raise ValueError(f"{split.source} holds no {part} images; at least one is needed")
        if len(split.images) != len(split.labels):
            raise ValueError(
                f"{split.source} holds {len(split.images):,} images but {len(split.labels):,} labels; "
                "fetch the files again"
            )
    if train.images.shape[1:] != valid.images.shape[1:]:
        raise ValueError(
            f"training images are {_shape(train)} but validation images are {_shape(valid)} "
            f"({train.source}, {valid.source}); both must have one size"
        )
    classes = 1 + max(int(train.labels.max()), int(valid.labels.max()))
    if classes < 2 or train.labels.min() == train.labels.max():
        raise ValueError(f"{train.source} holds one class only; a classifier needs at least two")
    arrays = (train.images, train.labels, valid.images, valid.labels)
    info = DataInfo(name, digest(*arrays), note, len(train.images), len(valid.images))
    return ImageSet(
        info,
        classes,
        torch.from_numpy(train.images),
        torch.from_numpy(train.labels.astype(np.int64)),
        torch.from_numpy(valid.images),
        torch.from_numpy(valid.labels.astype(np.int64)),
    )


@dataclass(frozen=True)
class Split:
    """One half of an image set before it is checked: images u8[n, c, h, w], labels i64[n] or u8[n], where it
    was read.
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[Any]
    source: Path


def expanded(data: str) -> Path:
    """The path that a user gave, `~` and `~name` expanded.

    Raises: ValueError: there is no such user, or this one has no home folder.
    """
    try:
        return Path(data).expanduser()
    except RuntimeError:
        raise ValueError(f"the home folder that {data} begins with is not known: give the whole path") from None


def digest(*arrays: npt.NDArray[Any]) -> str:
    """SHA-256 over the arrays' elements in row-major order; labels of any integer type count as little-endian
    int64.
    """
    sha = hashlib.sha256()
    for array in arrays:
        plain = array if array.dtype == np.uint8 and array.ndim > 1 else array.astype("<i8")
        sha.update(np.ascontiguousarray(plain).data)
    return sha.hexdigest()


def _shape(split: Split) -> str:
    channels, height, width = split.images.shape[1:]
    return f"{height}x{width} with {channels} channel{'s' if channels > 1 else ''}"
