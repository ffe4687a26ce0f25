"""Images in folders by class, in ImageNet's layout, decoded when they are drawn."""

import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from dlion.train import streams
from dlion.train.data.picture import decoded
from dlion.train.data.sets import DataInfo, expanded

IMAGE_SIZE = 224
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
LAYOUT = (
    "images in train/<class>/ and val/<class>/, as people have ImageNet (its validation images come in one folder: "
    "sort them into one for each class first)"
)
AREA = (0.08, 1.0)  # of a training image that is kept, and its aspect ratio: those of Szegedy et al. 2015
RATIO = (3 / 4, 4 / 3)
ATTEMPTS = 10
MARGIN = 256 / 224  # a validation image's shorter side over the square cut from its middle

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """Images by path, `size` x `size` pixels when they are drawn.

    A training image is a random part of 8 % to 100 % of the area, brought to that size, half of them mirrored; a
    validation image is the middle. Decoding takes as many threads as torch has in this process.
    """

    info: DataInfo
    size: int
    train_paths: tuple[Path, ...]
    valid_paths: tuple[Path, ...]
    train_labels: Tensor
    valid_labels: Tensor
    classes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def training(self, index: Tensor, *, seed: int, rank: int, step: int) -> Tensor:
        """u8[n, 3, size, size] of i64[n]: each a random part, perhaps mirrored."""
        count = len(index)
        numbers = streams.uniform(streams.FRAME, seed, rank, step, count=count * (4 * ATTEMPTS + 1))
        rows = numbers.reshape(count, -1)

        def one(at: int) -> Pixels:
            with _of(self.train_paths[int(index[at])]) as picture:
                part = picture.resize(
                    (self.size, self.size), Image.Resampling.BICUBIC, frame(picture.size, rows[at, :-1])
                )
            pixels = np.asarray(part)
            return pixels[:, ::-1] if rows[at, -1] < 0.5 else pixels

        return _stacked(one, count)

    def validation(self, index: Tensor) -> Tensor:
        """u8[n, 3, size, size] of i64[n]: the middle of each."""

        def one(at: int) -> Pixels:
            with _of(self.valid_paths[int(index[at])]) as picture:
                side = min(picture.size) / MARGIN
                left, top = ((length - side) / 2 for length in picture.size)
                box = (left, top, left + side, top + side)
                return np.asarray(picture.resize((self.size, self.size), Image.Resampling.BICUBIC, box))

        return _stacked(one, len(index))


def frame(size: tuple[int, int], numbers: npt.NDArray[np.float64]) -> tuple[float, float, float, float]:
    """The part of a picture of `size` (width, height) to keep: left, top, right, bottom.

    Each attempt takes four of `numbers` (area, ratio, place across, place down); the first part that fits counts, else
    the largest one in the middle whose ratio is allowed.
    """
    width, height = size
    for area, ratio, across, down in numbers.reshape(-1, 4):
        target = (AREA[0] + area * (AREA[1] - AREA[0])) * width * height
        aspect = math.exp(math.log(RATIO[0]) + ratio * math.log(RATIO[1] / RATIO[0]))
        wide, high = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = int(across * (width - wide + 1)), int(down * (height - high + 1))
            return left, top, left + wide, top + high
    wide, high = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def _of(path: Path) -> Image.Image:
    return decoded(path, str(path))


def _stacked(one: Callable[[int], Pixels], count: int) -> Tensor:
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # a pool kept for longer would not survive a fork
        found = list(threads.map(one, range(count)))
    return torch.from_numpy(np.stack(found).transpose(0, 3, 1, 2).copy())


def load_image_folder(data: str | None, size: int) -> ImageFolder:
    """The images below `data`: `train/<class>/*` and `val/<class>/*` (or `valid/`, `test/`), listed, not decoded.

    Classes are numbered in alphabetical order of their folders. The SHA-256 is of names and lengths.

    Raises: ValueError: no such images, or a class that only the validation images have.
    """
    if data is None:
        raise ValueError(f"task image-folder needs --data FOLDER: {LAYOUT}")
    root = expanded(data)
    halves = {half: root / half for half in ("train", "val", "valid", "test") if (root / half).is_dir()}
    if "train" not in halves or len(halves) < 2:
        raise ValueError(f"--data {data} does not hold {LAYOUT}")
    valid_name = next(half for half in halves if half != "train")
    sha = hashlib.sha256()
    train, valid = (_listed(halves[half], half, sha) for half in ("train", valid_name))
    classes = sorted({kind for kind, _ in train})
    number = {kind: at for at, kind in enumerate(classes)}
    if strange := sorted({kind for kind, _ in valid} - set(classes)):
        raise ValueError(f"{root} has validation images of class {strange[0]!r} but no training images of it")
    if len(classes) < 2 or not valid:
        raise ValueError(f"--data {data} holds {len(classes)} classes and {len(valid)} validation images: {LAYOUT}")
    counts = f"{len(train):,} training and {len(valid):,} validation images of {len(classes):,} classes"
    note = f"images of {root}: {counts}, decoded when drawn; its SHA-256 is of names and lengths"
    info = DataInfo(f"images of {root.name}", sha.hexdigest(), note, len(train), len(valid))
    return ImageFolder(
        info,
        size,
        tuple(path for _, path in train),
        tuple(path for _, path in valid),
        torch.tensor([number[kind] for kind, _ in train]),
        torch.tensor([number[kind] for kind, _ in valid]),
        len(classes),
    )


def _listed(folder: Path, half: str, sha: Any) -> list[tuple[str, Path]]:
    """Class and path of every image, in the order of their names."""
    found: list[tuple[str, Path]] = []
    try:
        for kind in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()):
            for entry in sorted(os.scandir(folder / kind), key=lambda entry: entry.name):
                if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".") and entry.is_file():
                    sha.update(f"{half}/{kind}/{entry.name} {entry.stat().st_size}\n".encode(errors="surrogateescape"))
                    found.append((kind, Path(entry.path)))
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read ({error.strerror}); check its permissions") from None
    return found
