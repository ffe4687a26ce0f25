"""Images in `train/<class>/*` and `test|val|valid/<class>/*`, in a folder or in a tar archive."""

import hashlib
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt

from dlion.train.data.cache import Arrays, cached_arrays
from dlion.train.data.picture import decoded
from dlion.train.data.sets import ImageSet, Split, image_set
from dlion.train.legal import shown

MOST_BYTES = 2**28  # of an image's file: archives may hold much in little
_TRAIN, _VALID = {"train"}, {"test", "val", "valid"}
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_LAYOUT = "images in train/<class>/ and test/<class>/ (or val/, valid/)"


def read_picture_folder(folder: Path) -> ImageSet:
    """The images below `folder` as u8[n, 3, h, w]; classes are numbered in alphabetical order of their
    folders.

    Raises: ValueError: no images in that layout, one class only, images of different sizes, or a damaged one.
    """
    return _finish(_decode(_folder_members(folder), folder), folder, cached="")


def read_archive(archive: Path) -> ImageSet:
    """The same from a tar archive, compressed or not. Nothing is unpacked; decoded images are kept in the
    cache folder.
    """
    try:
        with archive.open("rb") as file:
            # The 1 is the version of what _decode returns.
            key = f"pictures-1-{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise ValueError(f"{archive} cannot be read ({error.strerror}); check its permissions") from None
    arrays, where = cached_arrays(key, lambda: _decode(_archive_members(archive), archive))
    return _finish(arrays, archive, cached=f", {where}")


def _folder_members(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.glob("*/*/*")):
        if _is_picture(path.name):
            try:
                content = path.read_bytes()
            except OSError as error:
                raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
            yield path.relative_to(folder).as_posix(), content


def _archive_members(archive: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                if member.isfile() and _is_picture(PurePosixPath(member.name).name):
                    if member.size > MOST_BYTES:
                        raise ValueError(
                            f"{archive}: {shown(member.name)} has {member.size:,} bytes, too many for an image"
                        )
                    content = tar.extractfile(member)
                    assert content is not None, "regular files have content"
                    yield member.name, content.read()
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"{archive} is damaged or no tar archive ({error}); fetch it again") from None


def _is_picture(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in _SUFFIXES and not name.startswith(".")


def _decode(members: Iterable[tuple[str, bytes]], source: Path) -> Arrays:
    found: dict[str, dict[tuple[str, str], npt.NDArray[np.uint8]]] = {"train": {}, "valid": {}}
    suffixes = set()
    for name, content in members:
        parts = PurePosixPath(name).parts[-3:]
        if len(parts) == 3 and parts[0] in _TRAIN | _VALID:
            half = found["train" if parts[0] in _TRAIN else "valid"]
            half[parts[1], name] = _pixels(content, f"{source}: {name}")
            suffixes.add(PurePosixPath(name).suffix.lower().replace("jpeg", "jpg")[1:])
    if not found["train"] or not found["valid"]:
        raise ValueError(f"{source} does not hold {_LAYOUT}; unpack official CIFAR-10 archives first, with tar xf")
    classes = sorted({kind for kind, _ in found["train"]})
    strange = sorted({kind for kind, _ in found["valid"]} - set(classes))
    if strange:
        raise ValueError(f"{source} has validation images of class {strange[0]!r} but no training images of it")
    arrays: Arrays = {"classes": np.array(classes), "formats": np.array(sorted(suffixes))}
    for half_name, images in found.items():
        order = sorted(images)
        sizes = {image.shape for image in images.values()}
        if len(sizes) > 1:
            raise ValueError(f"the images of {source} have {len(sizes)} different sizes; bring all to one size first")
        arrays[f"{half_name}_images"] = np.stack([images[key] for key in order]).transpose(0, 3, 1, 2).copy()
        arrays[f"{half_name}_labels"] = np.array([classes.index(kind) for kind, _ in order], np.int64)
    return arrays


def _pixels(content: bytes, name: str) -> npt.NDArray[np.uint8]:
    return np.asarray(decoded(io.BytesIO(content), name))


def _finish(arrays: Arrays, source: Path, cached: str) -> ImageSet:
    train = Split(arrays["train_images"], arrays["train_labels"], source)
    valid = Split(arrays["valid_images"], arrays["valid_labels"], source)
    kind = "/".join(name.upper().replace("JPG", "JPEG") for name in arrays["formats"])
    is_cifar = tuple(arrays["classes"]) == _CIFAR10 and train.images.shape[1:] == (3, 32, 32)
    name = f"CIFAR-10 ({kind} copy)" if is_cifar else f"images of {source.name} ({kind})"
    note = (
        f"{name} from {source}: {len(train.images):,} training and {len(valid.images):,} validation "
        f"images of {len(arrays['classes'])} classes{cached}"
    )
    return image_set(name, note, train, valid)
