"""Augmentation of image batches as pure functions of (seed, rank, step)."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dlion.train import streams

PADDING = 4


class Augmentation(Protocol):
    """u8[b, c, h, w] -> the same shape."""

    def __call__(self, images: Tensor, *, seed: int, rank: int, step: int) -> Tensor: ...


def crop_and_flip(images: Tensor, *, seed: int, rank: int, step: int) -> Tensor:
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


def mixed(
    inputs: Tensor, labels: Tensor, classes: int, both: float, *, seed: int, rank: int, step: int
) -> tuple[Tensor, Tensor]:
    """MixUp (Zhang et al. 2018): each image f32[b, c, h, w] becomes `share` of itself and the rest of a partner.

    The targets f32[b, classes] are the shares of both labels. One share for the batch, from Beta(both, both), as the
    authors' own code has it; the partners are a permutation of the batch.
    """
    share = streams.beta(both, streams.SHARE, seed, rank, step)
    partner = torch.from_numpy(streams.order(streams.PARTNER, seed, rank, step, count=len(labels)))
    hot = one_hot(labels, classes).float()
    return share * inputs + (1 - share) * inputs[partner], share * hot + (1 - share) * hot[partner]
