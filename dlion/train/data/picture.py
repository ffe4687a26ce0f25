"""One picture from a file, of a size that fits into memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from PIL import Image

from dlion.train.legal import said_by

MOST_PIXELS = 90_000_000  # where Pillow itself warns of files that are small and become large


def decoded(file: Path | IO[bytes], name: str) -> Image.Image:
    """The picture in RGB. name: for the message.

    Raises: ValueError: it is no picture that can be read, or too large a one.
    """
    with _readable(name), Image.open(file) as picture:
        width, height = picture.size
        if width * height > MOST_PIXELS:
            raise ValueError(f"{width} x {height} pixels are more than {MOST_PIXELS:,}")
        return picture.convert("RGB")


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # damaged files raise nearly anything, as there are many formats
        reason = said_by(error)
        raise ValueError(f"{name} is no readable image ({reason}); remove or replace it") from None
