"""CIFAR-10 (Krizhevsky 2009) in the forms people have it: official batches, image folders, archives of
images.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlion.train.data import inert_pickle
from dlion.train.data.pictures import read_archive, read_picture_folder
from dlion.train.data.sets import ImageSet, Split, expanded, image_set

_PIXELS = 3 * 32 * 32
_ARCHIVES = (".tar", ".tar.xz", ".tar.gz", ".tar.bz2", ".tgz", ".txz")
_HOW = (
    "download cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it and "
    "give --data the folder; a folder or .tar.xz of images (train/<class>/*, test/<class>/*) will do as well"
)


def load_cifar10(data: str | None = None) -> ImageSet:
    """CIFAR-10 as u8[n, 3, 32, 32] with ten classes; other sets of images of one size in such folders are
    read too.

    `data`, else `$DLION_DATA/cifar10` and `$DLION_DATA`, is a folder with the official python batches
    (`data_batch_1`), the official binary batches (`data_batch_1.bin`) or images in `train/<class>/` and
    `test|val|valid/<class>/`, a folder that holds one of these as `cifar-10-batches-py`,
    `cifar-10-batches-bin` or `cifar10_jpeg.tar.xz`, or an archive of images.

    Raises: ValueError: none of these there, or damaged.
    """
    root = os.environ.get("DLION_DATA")
    if data is not None:
        places = _places(expanded(data))
    else:
        places = [*_places(expanded(root) / "cifar10"), *_places(expanded(root))[1:]] if root else []
    for place in places:
        read = _reader(place)
        if read is not None:
            return read(place)
    looked = f"looked at {', '.join(map(str, places))}" if places else "neither --data nor $DLION_DATA is set"
    raise ValueError(f"no CIFAR-10 found: {looked}; {_HOW}")


def _places(root: Path) -> list[Path]:
    return [root, root / "cifar-10-batches-py", root / "cifar-10-batches-bin", root / "cifar10_jpeg.tar.xz"]


def _reader(place: Path) -> Callable[[Path], ImageSet] | None:
    if place.is_file() and place.name.endswith(_ARCHIVES):
        return read_archive
    if (place / "data_batch_1").is_file():
        return _read_python_batches
    if (place / "data_batch_1.bin").is_file():
        return _read_binary_batches
    if (place / "train").is_dir():
        return read_picture_folder
    return None


def _read_python_batches(folder: Path) -> ImageSet:
    names = [path.name for path in sorted(folder.glob("data_batch_*")) if not path.suffix]
    return _batches(folder, "official python batches", names, "test_batch", _python_batch)


def _read_binary_batches(folder: Path) -> ImageSet:
    names = [path.name for path in sorted(folder.glob("data_batch_*.bin"))]
    return _batches(folder, "official binary batches", names, "test_batch.bin", _binary_batch)


def _batches(folder: Path, kind: str, names: list[str], test: str, read: Callable[[Path], Split]) -> ImageSet:
    parts = [read(folder / name) for name in names]
    train = Split(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]), folder)
    valid = read(folder / test)
    counts = f"{len(train.images):,} training and {len(valid.images):,} test images"
    whole = (len(train.images), len(valid.images)) == (50_000, 10_000)
    name = "CIFAR-10" if whole else "CIFAR-10 (incomplete)"
    return image_set(name, f"{name} from the {kind} in {folder}: {counts}", train, valid)


def _python_batch(path: Path) -> Split:
    try:
        batch = inert_pickle.load(_read(path))
        fields = batch if isinstance(batch, dict) else {}
        data, labels = (fields.get(name.encode(), fields.get(name)) for name in ("data", "labels"))
        pixels = inert_pickle.as_bytes(data)
        if not isinstance(labels, list) or not all(type(label) is int for label in labels):
            raise ValueError("a list of labels was expected")
        if any(abs(label) >= 2**63 for label in labels):
            raise ValueError("a label is larger than any that there can be")
    except ValueError as error:
        raise ValueError(f"{path} is damaged or no CIFAR-10 batch ({error}); {_HOW}") from None
    if pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise ValueError(f"{path} holds an array of shape {pixels.shape}; images of CIFAR-10 have {_PIXELS} bytes each")
    return Split(pixels.reshape(-1, 3, 32, 32), _checked(np.array(labels, np.int64), path), path)


def _binary_batch(path: Path) -> Split:
    content = _read(path)
    if not content or len(content) % (1 + _PIXELS):
        raise ValueError(f"{path} holds {len(content):,} bytes, not a multiple of {1 + _PIXELS}: damaged; {_HOW}")
    records = np.frombuffer(bytearray(content), np.uint8).reshape(-1, 1 + _PIXELS)
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32)
    return Split(images, _checked(records[:, 0].astype(np.int64), path), path)


def _checked(labels: npt.NDArray[np.int64], path: Path) -> npt.NDArray[np.int64]:
    if labels.size and not 0 <= labels.min() <= labels.max() <= 9:
        raise ValueError(f"{path} has labels of {labels.min()} to {labels.max()}; CIFAR-10 has 0 to 9: damaged; {_HOW}")
    return labels


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {_HOW}") from None
