"""AutoAugment with the policy for ImageNet (Cubuk et al. 2019, table 9) as a pure function of (seed, rank, step)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from dlion.train import streams

GREY = (128, 128, 128)  # what moves in at the border, as in the authors' code

# Two operations a line, each with its probability and its magnitude, 0 to 9 (0 where it has none).
POLICY = tuple(
    (
        (first, float(chance), int(level)),
        (second, float(other_chance), int(other_level)),
    )
    for first, chance, level, second, other_chance, other_level in (
        line.split()
        for line in """
        posterize 0.4 8    rotate 0.6 9
        solarize 0.6 5     autocontrast 0.6 0
        equalize 0.8 0     equalize 0.6 0
        posterize 0.6 7    posterize 0.6 6
        equalize 0.4 0     solarize 0.2 4
        equalize 0.4 0     rotate 0.8 8
        solarize 0.6 3     equalize 0.6 0
        posterize 0.8 5    equalize 1.0 0
        rotate 0.2 3       solarize 0.6 8
        equalize 0.6 0     posterize 0.4 6
        rotate 0.8 8       color 0.4 0
        rotate 0.4 9       equalize 0.6 0
        equalize 0.0 0     equalize 0.8 0
        invert 0.6 0       equalize 1.0 0
        color 0.6 4        contrast 1.0 8
        rotate 0.8 8       color 1.0 2
        color 0.8 8        solarize 0.8 7
        sharpness 0.4 7    invert 0.6 0
        shear-x 0.6 5      equalize 1.0 0
        color 0.4 0        equalize 0.6 0
        equalize 0.4 0     solarize 0.2 4
        solarize 0.6 5     autocontrast 0.6 0
        invert 0.6 0       equalize 1.0 0
        color 0.6 4        contrast 1.0 8
        equalize 0.8 0     equalize 0.6 0
        """.strip().splitlines()
    )
)


def autoaugment(images: Tensor, *, seed: int, rank: int, step: int) -> Tensor:
    """One of the policy's 25 pairs of operations on each image of u8[b, 3, h, w], drawn for each image by itself.

    Raises: ValueError: the images are not RGB.
    """
    count, channels, _, _ = images.shape
    if channels != 3:
        raise ValueError(f"--autoaugment needs RGB images, and these have {channels} channel")
    pairs = streams.below(len(POLICY), streams.POLICY, seed, rank, step, 0, count=count)
    chances = streams.uniform(streams.POLICY, seed, rank, step, 1, count=2 * count).reshape(count, 2)
    signs = 1 - 2 * streams.below(2, streams.POLICY, seed, rank, step, 2, count=2 * count).reshape(count, 2)
    found = [
        _changed(image, POLICY[pair], chance, sign)
        for image, pair, chance, sign in zip(images.numpy(), pairs, chances, signs, strict=True)
    ]
    return torch.from_numpy(np.stack(found))


def _changed(
    image: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    pair: tuple[tuple[str, float, int], ...],
    chances: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    signs: "np.ndarray[tuple[int], np.dtype[np.int64]]",
) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
    for (operation, probability, level), chance, sign in zip(pair, chances, signs, strict=True):
        if chance < probability:
            picture = OPERATIONS[operation](picture, level, int(sign))
    return np.asarray(picture).transpose(2, 0, 1)


def _rotate(picture: Image.Image, level: int, sign: int) -> Image.Image:
    return picture.rotate(sign * 30.0 * level / 9, fillcolor=GREY)


def _shear_x(picture: Image.Image, level: int, sign: int) -> Image.Image:
    slope = sign * 0.3 * level / 9
    return picture.transform(
        picture.size, Image.Transform.AFFINE, (1, slope, 0, 0, 1, 0), Image.Resampling.BICUBIC, fillcolor=GREY
    )


def _enhanced(kind: Callable[[Image.Image], Any]) -> "Operation":
    return lambda picture, level, sign: kind(picture).enhance(1.0 + sign * 0.9 * level / 9)


Operation = Callable[[Image.Image, int, int], Image.Image]
# A picture, a magnitude of 0 to 9 and a direction. The ranges are those of the paper's table 6, cut into ten steps. It
# does not say what a step means for colour, contrast and sharpness, 0.1 to 1.9: 0 changes nothing, and 9 goes to either
# end, as the implementations in common use have it.
OPERATIONS: dict[str, Operation] = {
    "shear-x": _shear_x,
    "rotate": _rotate,
    "autocontrast": lambda picture, level, sign: ImageOps.autocontrast(picture),
    "invert": lambda picture, level, sign: ImageOps.invert(picture),
    "equalize": lambda picture, level, sign: ImageOps.equalize(picture),
    "solarize": lambda picture, level, sign: ImageOps.solarize(picture, 256 - round(256 * level / 9)),
    "posterize": lambda picture, level, sign: ImageOps.posterize(picture, 8 - round(4 * level / 9)),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "color": _enhanced(ImageEnhance.Color),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
}
