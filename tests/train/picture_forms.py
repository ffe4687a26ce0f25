"""Writes real images, those of the shipped subset of Fashion-MNIST, in every form in which people have
CIFAR-10.
"""

import pickle

import numpy as np
from PIL import Image

from dlion.train.data import fashion

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def pictures_of_the_subset():
    """40 training images u8[40, 3, 32, 32], their labels i64[40], 20 validation images and labels, sorted by
    class.
    """
    with np.load(fashion.SUBSET, allow_pickle=False) as arrays:
        subset = dict(arrays)

    def pick(part, each):
        order = np.argsort(subset[f"{part}_labels"], kind="stable")
        order = order.reshape(10, -1)[:, :each].ravel()
        images = np.pad(subset[f"{part}_images"][order], ((0, 0), (2, 2), (2, 2)))
        shades = np.stack([images, images // 2, 255 - images], axis=1)  # three channels that can be told apart
        return shades, subset[f"{part}_labels"][order].astype(np.int64)

    return *pick("train", 4), *pick("valid", 2)


def write_python_batches(folder, pictures, keys=lambda name: name.encode(), protocol=2):
    folder.mkdir(parents=True)
    images, labels, test_images, test_labels = pictures
    halves = [("data_batch_1", images[:24], labels[:24]), ("data_batch_2", images[24:], labels[24:])]
    for name, part, kinds in [*halves, ("test_batch", test_images, test_labels)]:
        batch = {
            keys("data"): part.reshape(len(part), -1),
            keys("labels"): kinds.tolist(),
            keys("batch_label"): b"x",
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol))


def write_binary_batches(folder, pictures):
    folder.mkdir(parents=True)
    images, labels, test_images, test_labels = pictures
    for name, part, kinds in [
        ("data_batch_1.bin", images, labels),
        ("test_batch.bin", test_images, test_labels),
    ]:
        records = np.concatenate([kinds.astype(np.uint8)[:, None], part.reshape(len(part), -1)], axis=1)
        (folder / name).write_bytes(records.tobytes())


def write_picture_folder(folder, pictures, suffix="png", valid="test"):
    images, labels, test_images, test_labels = pictures
    for half, part, kinds in [("train", images, labels), (valid, test_images, test_labels)]:
        for number, (image, kind) in enumerate(zip(part, kinds, strict=True)):
            path = folder / half / CLASSES[kind] / f"{number:04}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(path)
