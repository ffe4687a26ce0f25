"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): the whole set where there is one, else the subset shipped in
the package.
"""

import gzip
import hashlib
import math
import os
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlion.train.data.sets import ImageSet, Split, expanded, image_set

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SUBSET = Path(__file__).parent.parent / "assets" / "fashion-mnist-subset.npz"
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# Of the decompressed files as published: Debian compresses them again, so sums of the .gz files differ
# between sources.
PUBLISHED = (
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
MOST_DIMENSIONS = 4
MOST_BYTES = 2**31  # unpacked: a small file may become a large one
HOW = "apt-get install dataset-fashion-mnist, or the four IDX files of https://github.com/zalandoresearch/fashion-mnist"


def load_fashion(data: str | None = None) -> ImageSet:
    """Fashion-MNIST as u8[n, 1, 28, 28] with ten classes.

    `data` is a folder with the four IDX files, gzipped or not, or with a torchvision `FashionMNIST/raw`
    inside. Without it the places are `$DLION_DATA` (`fashion-mnist` inside it, or a torchvision folder),
    Debian's package, and at last the 6,000/2,000-image subset of this package; `info.note` says which was
    used.

    Raises: ValueError: `data` holds no such files, or the files found are damaged.
    """
    if data is not None:
        root = expanded(data)
        places = [root, root / "fashion-mnist", root / "FashionMNIST" / "raw", root / "raw"]
        folder = _first_with_files(places)
        if folder is None:
            raise ValueError(
                f"no Fashion-MNIST in --data {data}: looked for {FILES[0]}[.gz] and its three companions in "
                f"{', '.join(map(str, places))}; get it by {HOW}, or leave out --data"
            )
        return _read_folder(folder)
    named = os.environ.get("DLION_DATA")
    places = [expanded(named) / name for name in ("fashion-mnist", "FashionMNIST/raw")] if named else []
    folder = _first_with_files([*places, DEBIAN])
    return _read_subset() if folder is None else _read_folder(folder)


def _first_with_files(places: list[Path]) -> Path | None:
    return next((place for place in places if all(_find(place, name) for name in FILES)), None)


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def _read_folder(folder: Path) -> ImageSet:
    contents = []
    for name in FILES:
        path = _find(folder, name)
        assert path is not None, "the folder was chosen because it has all four files"
        contents.append((path, _read_bytes(path)))
    images, labels, test_images, test_labels = (parse_idx(content, path) for path, content in contents)
    train, valid = _split(images, labels, folder), _split(test_images, test_labels, folder)
    sums = tuple(hashlib.sha256(content).hexdigest() for _, content in contents)
    known = "the files as published" if sums == PUBLISHED else "not the files as published (other SHA-256)"
    note = f"Fashion-MNIST from {folder}: {len(images):,} training and {len(test_images):,} test images, {known}"
    name = "Fashion-MNIST" if sums == PUBLISHED else f"IDX images of {folder.name}"
    return image_set(name, note, train, valid)


def _split(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], folder: Path) -> Split:
    if images.ndim != 3 or labels.ndim != 1:
        raise ValueError(
            f"the IDX files in {folder} have {images.ndim} and {labels.ndim} dimensions; "
            "images need 3 (count, height, width) and labels 1: they are swapped or of another kind"
        )
    return Split(images[:, None], labels, folder)


def _read_bytes(path: Path) -> bytes:
    try:
        return _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); fetch it again: {HOW}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions") from None


def _unpacked(path: Path) -> bytes:
    parts: list[bytes] = []
    with gzip.open(path) as file:
        while part := file.read(2**24):
            parts.append(part)
            if len(parts) * 2**24 > MOST_BYTES:
                raise ValueError(
                    f"{path} unpacks to more than {MOST_BYTES:,} bytes, and no set of this kind does: {HOW}"
                )
    return b"".join(parts)


def parse_idx(content: bytes, path: Path) -> npt.NDArray[np.uint8]:
    """An array from the bytes of an IDX file: 0, 0, 8 (unsigned byte), dimensions, big-endian sizes,
    elements.

    Raises: ValueError: not an IDX file of bytes, or its length is not what its header says.
    """
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(
            f"{path} is no IDX file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}, "
            "not 00 00 08; fetch it again"
        )
    if content[3] > MOST_DIMENSIONS:
        raise ValueError(
            f"{path} holds an array of {content[3]} dimensions; images have 3 and labels 1: it is damaged or of "
            "another kind; fetch it again"
        )
    header = 4 + 4 * content[3]
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4)]
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise ValueError(f"{path} holds {len(content):,} bytes where its header asks for {expected:,}; fetch it again")
    return np.frombuffer(bytearray(content), np.uint8, offset=header).reshape(shape)


def _read_subset() -> ImageSet:
    try:
        # Opened here: np.load leaves the file open when it turns out to be no zip archive.
        with SUBSET.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            train = Split(arrays["train_images"][:, None], arrays["train_labels"], SUBSET)
            valid = Split(arrays["valid_images"][:, None], arrays["valid_labels"], SUBSET)
    except Exception as error:  # damaged archives raise nearly anything
        raise ValueError(f"{SUBSET} is damaged ({error}); install dlion again") from None
    note = (
        f"Fashion-MNIST subset shipped with dlion: {len(train.images):,} of 60,000 "
        f"training and {len(valid.images):,} of 10,000 test images "
        "(for the whole set: apt-get install dataset-fashion-mnist, or --data)"
    )
    return image_set("Fashion-MNIST (subset)", note, train, valid)
