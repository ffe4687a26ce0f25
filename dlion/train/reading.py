"""The flags that say how data is read; each task takes some of them (`dlion.train.tasks`)."""

from dataclasses import dataclass, fields
from typing import Annotated

from cyclopts import Group, Parameter

from dlion.train.legal import require, require_count

READING = Parameter(group=Group("Data", sort_key=2))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a task reads its data; None or False is the task's own way.

    Raises:
        ValueError: a value is out of range.
    """

    context: Annotated[int | None, READING] = None
    """Tokens (or bytes) of a training window: 128 unless given."""
    eval_windows: Annotated[int | None, READING] = None
    """Windows of the validation text that are judged, at even distances: 256 unless given; at most those it has."""
    image_size: Annotated[int | None, READING] = None
    """Side in pixels to which image-folder brings images: 224 unless given."""
    mixup: Annotated[float | None, READING] = None
    """Mix pairs of images by a share drawn from Beta(MIXUP, MIXUP) for each batch."""
    autoaugment: Annotated[bool, READING] = False
    """Apply AutoAugment's policy for ImageNet to training images."""
    tokenizer: Annotated[str | None, READING] = None
    """Folder of a tokenizer of `transformers`, or a tokenizer.json: that of --pretrained unless given, else bytes."""
    column: Annotated[str | None, READING] = None
    """Column with the text of a Hugging Face data set: text unless given."""
    stream: Annotated[bool, READING] = False
    """Read a Hugging Face data set as a stream, from its beginning, without storing or shuffling all of it."""

    def check_reading(self) -> None:
        """Raise unless every value is in range."""
        for flag in ("context", "eval_windows", "image_size"):
            require_count(flag, getattr(self, flag))
        require(self.mixup is None or 0.0 < self.mixup <= 1.0, "mixup", self.mixup, "above 0 and at most 1")

    def given(self) -> list[str]:
        """The names of the flags that differ from a task's own way."""
        return [field.name for field in fields(Reading) if getattr(self, field.name) not in (None, False)]


def reading_of(config: Reading) -> Reading:
    """The flags of reading alone, from a whole configuration."""
    return Reading(**{field.name: getattr(config, field.name) for field in fields(Reading)})


AS_USUAL = Reading()
