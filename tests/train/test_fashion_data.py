"""Fashion-MNIST: found in every usual place, else the shipped subset, and damage is one sentence.

The images are those of the shipped subset. $DLION_TEST_FASHION may name a folder with the whole set.
"""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dlion.train.data import fashion
from dlion.train.data.fashion import load_fashion


@pytest.fixture(scope="module")
def subset():
    with np.load(fashion.SUBSET, allow_pickle=False) as arrays:
        return dict(arrays)


@pytest.fixture(autouse=True)
def only_this_folder(monkeypatch, tmp_path):
    """No data set that this machine happens to have takes part."""
    monkeypatch.delenv("DLION_DATA", raising=False)
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "no-debian-package")


def one_sentence(error):
    message = str(error.value)
    assert "\n" not in message and len(message) < 900
    return message


def idx(array):
    return b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def write_idx(folder, subset, pack=lambda content: content, suffix="", count=50):
    folder.mkdir(parents=True)
    spread = slice(None, None, 6000 // count)
    arrays = (
        subset["train_images"][spread],
        subset["train_labels"][spread],
        subset["valid_images"][::100],
        subset["valid_labels"][::100],
    )
    for name, array in zip(fashion.FILES, arrays, strict=True):
        (folder / f"{name}{suffix}").write_bytes(pack(idx(array)))
    return arrays


def test_the_subset_is_used_when_nothing_else_is_there_and_says_so():
    found = load_fashion()
    assert "subset" in found.info.note and "6,000" in found.info.note and "2,000" in found.info.note
    assert found.train_images.shape == (6000, 1, 28, 28) and found.train_images.dtype == torch.uint8
    assert found.valid_images.shape == (2000, 1, 28, 28)
    assert torch.bincount(found.train_labels).tolist() == [600] * 10
    assert torch.bincount(found.valid_labels).tolist() == [200] * 10
    # Mean and deviation of the whole set are .2860 and .3530.
    pixels = found.train_images.double() / 255
    assert abs(pixels.mean() - 0.286) < 0.005 and abs(pixels.std() - 0.353) < 0.005
    assert found.info.sha256 == "afc8f1a2e59c94445c0889cda9405380ccabbdc00267e3e5081a77b7b73aebfd"


def test_the_subset_is_the_first_of_each_class_of_the_whole_set(subset):
    folder = Path(os.environ.get("DLION_TEST_FASHION", "/usr/share/datasets/fashion-mnist"))
    if not folder.is_dir():
        pytest.skip("the whole Fashion-MNIST is not installed and $DLION_TEST_FASHION does not name it")
    whole = load_fashion(str(folder))
    assert whole.info.name == "Fashion-MNIST" and "as published" in whole.info.note
    labels = whole.train_labels.numpy()
    first = np.sort(np.concatenate([np.flatnonzero(labels == kind)[:600] for kind in range(10)]))
    assert np.array_equal(whole.train_images[first, 0].numpy(), subset["train_images"])
    assert np.array_equal(labels[first], subset["train_labels"])


@pytest.mark.parametrize("inside", ["", "fashion-mnist", "FashionMNIST/raw", "raw"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_found_in_every_usual_place(tmp_path, subset, inside, suffix):
    pack = gzip.compress if suffix else bytes
    images, labels, *_ = write_idx(tmp_path / "data" / inside, subset, pack, suffix)
    found = load_fashion(str(tmp_path / "data"))
    assert torch.equal(found.train_images[:, 0], torch.from_numpy(images.copy()))
    assert found.train_labels.tolist() == labels.tolist()
    assert "not the files as published" in found.info.note and found.info.name != "Fashion-MNIST"
    assert (found.info.train_size, found.info.valid_size) == (50, 20)


def test_the_order_of_places_is_data_then_environment_then_debian(tmp_path, subset, monkeypatch):
    write_idx(tmp_path / "debian", subset, count=20)
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "debian")
    assert load_fashion().info.train_size == 20
    write_idx(tmp_path / "root" / "fashion-mnist", subset, count=30)
    monkeypatch.setenv("DLION_DATA", str(tmp_path / "root"))
    assert load_fashion().info.train_size == 30
    write_idx(tmp_path / "given", subset, count=40)
    assert load_fashion(str(tmp_path / "given")).info.train_size == 40


def test_data_given_but_empty_is_an_error_and_no_silent_subset(tmp_path):
    with pytest.raises(ValueError, match="dataset-fashion-mnist") as error:
        load_fashion(str(tmp_path))
    assert str(tmp_path / "FashionMNIST" / "raw") in one_sentence(error)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda good: gzip.compress(good)[:-40], "damaged"),
        (lambda good: b"no gzip at all", "damaged"),
        (lambda good: gzip.compress(b"\0\0\x0d" + good[3:]), "no IDX file"),
        (lambda good: gzip.compress(b""), "nothing"),
        (lambda good: gzip.compress(good[:-1]), "header asks for"),
        (lambda good: gzip.compress(good + b"x"), "header asks for"),
        (lambda good: gzip.compress(good[:6]), "header asks for"),
        (lambda good: gzip.compress(idx(np.zeros(50, np.uint8))), "dimensions"),
    ],
)
def test_damaged_idx_files_are_refused(tmp_path, subset, damage, word):
    images, *_ = write_idx(tmp_path / "data", subset, gzip.compress, ".gz")
    path = tmp_path / "data" / f"{fashion.FILES[0]}.gz"
    path.write_bytes(damage(idx(images)))
    with pytest.raises(ValueError, match=word) as error:
        load_fashion(str(tmp_path / "data"))
    assert "data" in one_sentence(error)


def test_one_class_and_unequal_counts_are_refused(tmp_path, subset):
    write_idx(tmp_path / "data", subset)
    labels = tmp_path / "data" / fashion.FILES[1]
    labels.write_bytes(idx(np.zeros(50, np.uint8)))
    with pytest.raises(ValueError, match="one class"):
        load_fashion(str(tmp_path / "data"))
    labels.write_bytes(idx(np.zeros(49, np.uint8)))
    with pytest.raises(ValueError, match="50 images but 49 labels"):
        load_fashion(str(tmp_path / "data"))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip"], ids=["empty", "no zip"])
def test_a_damaged_subset_says_to_install_again(tmp_path, monkeypatch, content):
    monkeypatch.setattr(fashion, "SUBSET", tmp_path / "subset.npz")
    (tmp_path / "subset.npz").write_bytes(content)
    with pytest.raises(ValueError, match="install dlion again") as error:
        load_fashion()
    one_sentence(error)


def test_a_truncated_subset_says_to_install_again(tmp_path, monkeypatch):
    (tmp_path / "subset.npz").write_bytes(fashion.SUBSET.read_bytes()[:-1000])
    monkeypatch.setattr(fashion, "SUBSET", tmp_path / "subset.npz")
    with pytest.raises(ValueError, match="install dlion again"):
        load_fashion()
