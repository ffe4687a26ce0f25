"""CIFAR-10: every form is read alike, damage is one sentence, and a pickle never runs anything.

The images are real ones of Fashion-MNIST, written out in each form; the true archive is read where
$DLION_TEST_CIFAR names it.
"""

import io
import os
import pickle
import shutil
import tarfile

import numpy as np
import pytest
import torch
from picture_forms import (
    pictures_of_the_subset,
    write_binary_batches,
    write_picture_folder,
    write_python_batches,
)
from PIL import Image

from dlion.train.data import inert_pickle
from dlion.train.data.cifar import load_cifar10


@pytest.fixture(scope="module")
def pictures():
    return pictures_of_the_subset()


@pytest.fixture(autouse=True)
def only_this_folder(monkeypatch, tmp_path):
    """No data set that this machine happens to have takes part."""
    monkeypatch.delenv("DLION_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def one_sentence(error):
    message = str(error.value)
    assert "\n" not in message and len(message) < 900
    return message


def same(found, pictures):
    names = ("train_images", "train_labels", "valid_images", "valid_labels")
    return all(np.array_equal(getattr(found, name).numpy(), want) for name, want in zip(names, pictures, strict=True))


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_python_batches(tmp_path, pictures, inside, protocol):
    write_python_batches(tmp_path / "data" / inside, pictures, protocol=protocol)
    found = load_cifar10(str(tmp_path / "data"))
    assert same(found, pictures)
    assert "python batches" in found.info.note and "40 training" in found.info.note


def test_python_batches_as_python_2_wrote_them(pictures):
    """The official files: byte strings of Python 2 (opcode U) and NumPy 1's module names."""
    pixels = pictures[0][:2].reshape(2, -1)
    content = pixels.tobytes()
    raw = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87R"
        b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tb\x89T" + len(content).to_bytes(4, "little") + content + b"tbU\x06labels](K\x03K\x07eu."
    )
    batch = inert_pickle.load(raw)
    assert np.array_equal(inert_pickle.as_bytes(batch[b"data"]), pixels)
    assert batch[b"labels"] == [3, 7]


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_binary_batches(tmp_path, pictures, inside):
    write_binary_batches(tmp_path / "data" / inside, pictures)
    assert same(load_cifar10(str(tmp_path / "data")), pictures)


@pytest.mark.parametrize("valid", ["test", "val", "valid"])
def test_picture_folder(tmp_path, pictures, valid):
    write_picture_folder(tmp_path / "data", pictures, valid=valid)
    found = load_cifar10(str(tmp_path / "data"))
    assert same(found, pictures)
    assert found.info.name == "CIFAR-10 (PNG copy)"


def test_archive_is_decoded_once_and_called_a_jpeg_copy(tmp_path, pictures, monkeypatch):
    write_picture_folder(tmp_path / "data", pictures, suffix="jpg")
    with tarfile.open(tmp_path / "copy.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "data", arcname="CIFAR-10-images")
    first = load_cifar10(str(tmp_path / "copy.tar.xz"))
    assert first.info.name == "CIFAR-10 (JPEG copy)"
    assert np.array_equal(first.train_labels.numpy(), pictures[1])
    assert (
        first.train_images.float() - torch.from_numpy(pictures[0]).float()
    ).abs().mean() < 20  # lossy, but these images
    monkeypatch.setattr("dlion.train.data.pictures._decode", None)  # a second decoding would fail
    again = load_cifar10(str(tmp_path / "copy.tar.xz"))
    assert again.info == first.info and torch.equal(again.train_images, first.train_images)
    assert load_cifar10_from_environment(tmp_path, monkeypatch).info.sha256 == first.info.sha256


def load_cifar10_from_environment(tmp_path, monkeypatch):
    (tmp_path / "cifar10").mkdir()
    shutil.copy(tmp_path / "copy.tar.xz", tmp_path / "cifar10" / "cifar10_jpeg.tar.xz")
    monkeypatch.setenv("DLION_DATA", str(tmp_path))
    return load_cifar10()


def test_the_same_pictures_have_the_same_digest_in_every_form(tmp_path, pictures):
    write_python_batches(tmp_path / "py", pictures)
    write_binary_batches(tmp_path / "bin", pictures)
    write_picture_folder(tmp_path / "png", pictures)
    assert len({load_cifar10(str(tmp_path / form)).info.sha256 for form in ("py", "bin", "png")}) == 1


def test_missing_cifar_says_where_it_looked_and_how_to_get_it(tmp_path):
    with pytest.raises(ValueError, match=r"cs\.toronto\.edu") as error:
        load_cifar10(str(tmp_path))
    assert str(tmp_path / "cifar-10-batches-py") in one_sentence(error)
    with pytest.raises(ValueError, match="neither --data nor"):
        load_cifar10()


class Attack:
    """Pickles as a call of os.mkdir, as a hostile download would."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("hidden_in", ["data", "batch_label"])
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path, pictures, hidden_in):
    write_python_batches(tmp_path / "data", pictures)
    batch = {b"data": pictures[0].reshape(40, -1), b"labels": pictures[1].tolist()}
    batch[hidden_in.encode()] = Attack(tmp_path / "owned")
    (tmp_path / "data" / "data_batch_1").write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(ValueError, match="mkdir") as error:
        load_cifar10(str(tmp_path / "data"))
    one_sentence(error)
    assert not (tmp_path / "owned").exists()


ONE = np.zeros((1, 3072), np.uint8)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": 3, b"labels": []}),
        pickle.dumps({b"data": ONE, b"labels": [2**63]}, 2),
        pickle.dumps({b"data": ONE, b"labels": [-(2**70)]}, 2),
    ],
)
def test_damaged_python_batches_are_refused(tmp_path, pictures, content):
    write_python_batches(tmp_path / "data", pictures)
    (tmp_path / "data" / "data_batch_1").write_bytes(content)
    with pytest.raises(ValueError, match="damaged or no CIFAR-10 batch") as error:
        load_cifar10(str(tmp_path / "data"))
    one_sentence(error)


def test_every_prefix_of_a_python_batch_is_refused(pictures):
    whole = pickle.dumps({b"data": pictures[0][:1].reshape(1, -1), b"labels": [0]}, 2)
    for length in range(0, len(whole), 37):
        with pytest.raises(ValueError):
            inert_pickle.load(whole[:length])


def test_arrays_of_other_types_or_lengths_are_refused():
    for array in (np.zeros(4, np.float32), np.array([object()])):
        with pytest.raises(ValueError):
            inert_pickle.as_bytes(inert_pickle.load(pickle.dumps(array, 2)))
    record = inert_pickle.load(pickle.dumps(np.zeros((2, 2), np.uint8), 2))
    record.shape = (2, 3)
    with pytest.raises(ValueError, match="holds 4 bytes"):
        inert_pickle.as_bytes(record)


def test_damaged_binary_batches_are_refused(tmp_path, pictures):
    write_binary_batches(tmp_path / "data", pictures)
    path = tmp_path / "data" / "data_batch_1.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(ValueError, match="not a multiple"):
        load_cifar10(str(tmp_path / "data"))
    path.write_bytes(b"\x0b" + good[1:])
    with pytest.raises(ValueError, match="labels of 0 to 11"):
        load_cifar10(str(tmp_path / "data"))
    path.write_bytes(good)
    (tmp_path / "data" / "test_batch.bin").unlink()
    with pytest.raises(ValueError, match="No such file"):
        load_cifar10(str(tmp_path / "data"))


def test_picture_folders_that_cannot_be_used_are_refused(tmp_path, pictures):
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="does not hold images"):
        load_cifar10(str(tmp_path / "empty"))
    write_picture_folder(tmp_path / "one", [part[:2] for part in pictures])
    with pytest.raises(ValueError, match="one class"):
        load_cifar10(str(tmp_path / "one"))
    write_picture_folder(tmp_path / "data", pictures)
    shutil.copytree(tmp_path / "data" / "test" / "cat", tmp_path / "data" / "test" / "unicorn")
    with pytest.raises(ValueError, match="'unicorn' but no training"):
        load_cifar10(str(tmp_path / "data"))
    shutil.rmtree(tmp_path / "data" / "test" / "unicorn")
    strange = tmp_path / "data" / "train" / "cat" / "9.png"
    Image.new("RGB", (33, 32)).save(strange)
    with pytest.raises(ValueError, match="2 different sizes"):
        load_cifar10(str(tmp_path / "data"))
    strange.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"9\.png is no readable image") as error:
        load_cifar10(str(tmp_path / "data"))
    one_sentence(error)


def test_archives_that_cannot_be_used_are_refused(tmp_path, pictures):
    write_picture_folder(tmp_path / "data", pictures)
    path = tmp_path / "copy.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        tar.add(tmp_path / "data", arcname="x")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="damaged or no tar archive") as error:
        load_cifar10(str(path))
    one_sentence(error)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="damaged or no tar archive"):
        load_cifar10(str(path))
    with tarfile.open(path, "w:xz") as tar:
        tar.addfile(tarfile.TarInfo("cifar-10-batches-py/data_batch_1"), io.BytesIO())
    with pytest.raises(ValueError, match="tar xf"):
        load_cifar10(str(path))


def test_the_published_archive():
    archive = os.environ.get("DLION_TEST_CIFAR")
    if not archive:
        pytest.skip("$DLION_TEST_CIFAR does not name a .tar.xz of CIFAR-10 images")
    found = load_cifar10(archive)
    assert found.info.name == "CIFAR-10 (JPEG copy)"
    assert torch.bincount(found.train_labels).tolist() == [5000] * 10
    assert torch.bincount(found.valid_labels).tolist() == [1000] * 10
    mean = found.train_images.double().mean((0, 2, 3)) / 255
    assert torch.allclose(mean, torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64), atol=2e-3)
