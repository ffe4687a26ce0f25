"""Augmentation of image batches as a pure function of (seed, rank, step)."""

import torch

from dlion.train import streams

PADDING = 4


def crop_and_flip(images: torch.Tensor, *, seed: int, rank: int, step: int) -> torch.Tensor:
    """Shift each image of u8[b, c, h, w] by up to 4 pixels either way (what moves in is 0) and mirror half of
    them.

    The usual augmentation of CIFAR-10: zero padding of 4, a random crop of the old size, a random horizontal
    flip.
    """
    count, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (PADDING,) * 4)
    top, left = (
        torch.from_numpy(streams.below(2 * PADDING + 1, streams.CROP, seed, rank, step, axis, count=count))
        for axis in (0, 1)
    )
    flip = torch.from_numpy(streams.below(2, streams.FLIP, seed, rank, step, count=count)).bool()
    rows = top[:, None] + torch.arange(height)
    columns = torch.arange(width)
    columns = left[:, None] + torch.where(flip[:, None], columns.flip(0), columns)
    which = torch.arange(count)[:, None, None, None]
    return padded[which, torch.arange(channels)[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]
