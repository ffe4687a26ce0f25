"""What holds data: images, tokens, text, instructions; and models."""

import gzip
import io
import json
import pickle
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch
from fuzz import Parser
from fuzz_files import written
from mutations import spoiled, spoiled_lines
from PIL import Image
from torch import nn

from dlion.train.data import cache, cifar, fashion, image_folder, instructions, text
from dlion.train.plan.sources import header_shapes
from dlion.train.text_task import TextTask
from dlion.train.weights import load_weights, save_weights

CLASSES = ("cat", "dog")
SIZE = 6  # pixels


def picture(kind: str, seed: int) -> bytes:
    """A picture as a file of that kind."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


PICTURES = [picture(kind, seed) for seed, kind in enumerate(("PNG", "JPEG", "BMP", "WEBP"))]


def idx(folder: Path) -> Iterator[Parser]:
    """The files of MNIST's form, alone and as a folder in which one is bad."""
    images = bytes((0, 0, 8, 3, 0, 0, 0, 4, 0, 0, 0, 3, 0, 0, 0, 2)) + bytes(range(24))
    labels = bytes((0, 0, 8, 1, 0, 0, 0, 4)) + bytes((0, 1, 2, 1))
    place = folder / "idx"
    place.mkdir()
    for name, content in zip(fashion.FILES, (images, labels) * 2, strict=True):
        (place / name).write_bytes(content)
    yield Parser("idx", [images, labels], lambda content: fashion.parse_idx(content, place), 25)
    bad = place / fashion.FILES[0]
    yield Parser("idx in a folder", [images], written(bad, lambda: fashion.load_fashion(str(place))), 6)
    packed = folder / "packed"
    shutil.copytree(place, packed)
    (packed / fashion.FILES[1]).unlink()
    bad = packed / f"{fashion.FILES[1]}.gz"
    yield Parser("idx.gz", [gzip.compress(labels)], written(bad, lambda: fashion.load_fashion(str(packed))), 6)


def batches(folder: Path) -> Iterator[Parser]:
    """CIFAR-10 as pickles and as bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    told = {b"data": pixels, b"labels": [0, 1, 2]}
    pickles = [pickle.dumps(told, protocol=protocol) for protocol in (0, 2, 4, 5)]
    rows = b"".join(bytes((label,)) + pixels[label].tobytes() for label in range(3))
    for kind, good, seeds, ending in (
        ("pickles", pickles[1], pickles, ""),
        ("bins", rows, [rows], ".bin"),
    ):
        place = folder / kind
        place.mkdir()
        for name in ("data_batch_1", "test_batch"):
            (place / f"{name}{ending}").write_bytes(good)
        read = written(place / f"data_batch_1{ending}", lambda place=place: cifar.load_cifar10(str(place)))
        yield Parser(f"cifar {kind}", seeds, read, 9)


def archive(pictures: Sequence[bytes], mode: str) -> bytes:
    """Pictures in folders by class, in a tar file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:
        for half in ("train", "test"):
            for kind in CLASSES:
                for number, content in enumerate(pictures):
                    entry = tarfile.TarInfo(f"{half}/{kind}/{number}.png")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def pictures(folder: Path) -> Iterator[Parser]:
    """Images in archives and in folders."""
    place = folder / "pictures.tar"

    def load() -> None:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        cifar.load_cifar10(str(place))

    tars = [archive(PICTURES[:1], mode) for mode in ("w", "w:gz", "w:xz", "w:bz2")]
    yield Parser("tar of images", tars, written(place, load), 1.5)

    def spoiled_inside(content: bytes, others: Sequence[bytes], random: Random) -> bytes:
        return archive([spoiled(random.choice(PICTURES), PICTURES, random)], "w")

    yield Parser("bad images in a tar", tars, written(place, load), 1.5, spoiled_inside)
    root = folder / "images"
    for half in ("train", "val"):
        for kind in CLASSES:
            (root / half / kind).mkdir(parents=True)
            (root / half / kind / "0.png").write_bytes(PICTURES[0])
    found = image_folder.load_image_folder(str(root), 4)
    index = torch.arange(1)

    def draw() -> None:
        found.training(index, seed=0, rank=0, step=0)

    yield Parser("images in folders", PICTURES, written(root / "train" / "cat" / "0.png", draw), 6)
    kept = folder / "arrays.npz"
    np.savez(kept, pixels=np.zeros((2, 3), np.uint8), classes=np.array(["a", "b"]))
    yield Parser("cached arrays", [kept.read_bytes()], written(kept, lambda: cache._read(kept)), 6)


def texts(folder: Path) -> Iterator[Parser]:
    """Tokens, text and instructions."""
    place = folder / "tokens.bin"
    plain = np.arange(400, dtype="<u2").tobytes()
    headers = []
    for magic, dtype in ((20240520, "<u2"), (20240801, "<u4")):
        header = np.zeros(256, "<i4")
        header[:3] = magic, 1, 400
        headers.append(header.tobytes() + np.arange(400).astype(dtype).tobytes())

    def draw() -> None:
        found = TextTask("text", text.load_text(str(place)), "gpt", 8, most=1)
        found.batch(seed=0, rank=0, workers=1, step=0, size=8)
        found.evaluate(_Constant(found.vocabulary), rank=0, workers=1, device=torch.device("cpu"))

    yield Parser("token files", [plain, *headers], written(place, draw), 8)
    words = folder / "words.txt"
    yield Parser("text files", [b"one bit is enough. " * 20], written(words, lambda: text.load_text(str(words))), 3)
    rows = [{"instruction": f"Say {n}.", "input": "", "output": f"It is {n}."} for n in range(6)]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    for kind, seeds in (("jsonl", [lines]), ("json", [json.dumps(rows).encode()])):
        file = folder / f"rows.{kind}"
        read_rows = written(file, lambda file=file: instructions.load_instructions(str(file), "bytes", 128))
        yield Parser(f"instructions.{kind}", seeds, read_rows, 8, spoiled_lines)


class _Constant(nn.Module):
    """A language model that knows nothing."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(1))
        self.vocabulary = vocabulary

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.row.expand(*tokens.shape, self.vocabulary)


def weights(folder: Path) -> Iterator[Parser]:
    """Models in safetensors."""
    file = folder / "model.safetensors"
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    save_weights(model, file)
    seeds = [file.read_bytes()]
    yield Parser("weights", seeds, written(file, lambda: load_weights(model, file)), 8)
    header = folder / "other.safetensors"
    yield Parser("headers of weights", seeds, written(header, lambda: header_shapes(header)), 8)


def data(folder: Path) -> Iterator[Parser]:
    """All of them."""
    for kind in (idx, batches, pictures, texts, weights):
        yield from kind(folder)
