"""Readers of real data: each finds a set, checks it and returns uint8 (or uint16) arrays with a `DataInfo`.

Normalisation, augmentation and sampling come later (`dlion.train.tasks`), so that a reader never draws a
random number.
"""

from dlion.train.data.sets import DataInfo, ImageSet, TextSet

__all__ = ["DataInfo", "ImageSet", "TextSet"]
