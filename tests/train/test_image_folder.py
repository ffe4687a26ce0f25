"""Images by folder: the layout, what is drawn of a picture, and that everything random is a pure function."""

import re
import shutil
import threading

import numpy as np
import pytest
import torch
from picture_forms import pictures_of_the_subset, write_picture_folder
from PIL import Image

from dlion.train import streams
from dlion.train.ahead import Ahead
from dlion.train.augment import mixed
from dlion.train.autoaugment import OPERATIONS, POLICY, autoaugment
from dlion.train.data.image_folder import AREA, RATIO, frame, load_image_folder
from dlion.train.reading import Reading
from dlion.train.tasks import load_task

KEY = {"seed": 1, "rank": 2, "step": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    write_picture_folder(folder, pictures_of_the_subset(), suffix="jpeg", valid="val")
    large = Image.fromarray(np.arange(60 * 90 * 3, dtype=np.uint8).reshape(60, 90, 3))
    large.save(folder / "train" / "cat" / "n01_1.JPEG")  # as ImageNet spells it; sizes differ there
    large.convert("L").save(folder / "val" / "dog" / "grey.png")
    (folder / "train" / "cat" / "notes.txt").write_text("no picture")
    return folder


def test_the_layout_of_imagenet(folder):
    images = load_image_folder(str(folder), 16)
    assert images.shape == (3, 16, 16) and images.classes == 10
    assert (len(images.train_labels), len(images.valid_labels)) == (41, 21)
    assert images.train_labels.tolist() == sorted(images.train_labels.tolist())
    assert all(
        path.parent.name == sorted(path.parent.parent.iterdir())[label].name
        for path, label in zip(images.train_paths, images.train_labels, strict=True)
    )
    assert "41 training and 21 validation images of 10 classes" in images.info.note
    assert load_image_folder(str(folder), 32).info.sha256 == images.info.sha256
    valid = images.validation(torch.arange(21))
    assert valid.shape == (21, 3, 16, 16) and valid.dtype == torch.uint8
    train = images.training(torch.tensor([0, 0, 40]), **KEY)
    assert train.shape == (3, 3, 16, 16) and not torch.equal(train[0], train[1])


def test_a_validation_image_is_the_middle(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "x")
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, 64:] = 200
    pixels[:3] = pixels[-3:] = 77  # the border of 1/16 of the shorter side that is cut off
    Image.fromarray(pixels).save(tmp_path / "x" / "val" / "airplane" / "0.png")
    images = load_image_folder(str(tmp_path / "x"), 28)
    where = [path.name for path in images.valid_paths].index("0.png")
    (found,) = images.validation(torch.tensor([where]))
    assert found[0, :, :12].max() == 0 and found[0, :, 16:].min() == 200


def test_a_frame_keeps_area_and_ratio_and_lies_inside():
    numbers = streams.uniform(4, 4, count=4000).reshape(1000, 4)
    areas, ratios = [], []
    for row in numbers:
        left, top, right, bottom = frame((300, 200), row)
        assert 0 <= left < right <= 300 and 0 <= top < bottom <= 200
        areas.append((right - left) * (bottom - top) / 60_000)
        ratios.append((right - left) / (bottom - top))
    assert AREA[0] * 0.95 < min(areas) < 0.1 and max(areas) > 0.8
    assert RATIO[0] * 0.95 < min(ratios) < 0.8 and 1.25 < max(ratios) < RATIO[1] * 1.05
    assert frame((1000, 10), np.full(4, 0.99)) == (493, 0, 506, 10)  # nothing fits: the middle, as wide as allowed


@pytest.mark.parametrize("reading", [Reading(image_size=16), Reading(image_size=16, mixup=0.5, autoaugment=True)])
def test_a_batch_is_a_pure_function_of_seed_rank_and_step(folder, reading):
    task = load_task("image-folder", str(folder), reading)

    def draw(**changes):
        return task.batch(**{"seed": 1, "rank": 0, "workers": 4, "step": 5, "size": 16} | changes)

    first, targets = draw()
    state = torch.get_rng_state()
    torch.manual_seed(7)
    torch.set_num_threads(2)
    again, targets_again = draw()
    torch.set_num_threads(1)
    assert torch.equal(first, again) and torch.equal(targets, targets_again)
    torch.set_rng_state(state)
    for other in ({"seed": 2}, {"rank": 1}, {"step": 6}):
        assert not torch.equal(draw(**other)[0], first)
    assert targets.shape == ((16, 10) if reading.mixup else (16,))
    loss = task.loss(lambda inputs: torch.zeros(len(inputs), 10), first, targets)
    assert abs(loss.item() - np.log(10)) < 1e-5


def test_pictures_of_the_next_step_are_made_ahead_and_are_the_same(folder):
    images = load_image_folder(str(folder), 16)
    made = []

    def make(index, seed, rank, step):
        made.append((threading.get_ident(), rank, step))
        return images.training(index, seed=seed, rank=rank, step=step)

    def index(rank, step):
        return torch.from_numpy(streams.shuffled_positions(0, rank, step, 3, 41))

    ahead = Ahead()

    def take(rank, step):
        return ahead.take(make, index(rank, step), lambda: index(rank, step + 1), 0, rank, step)

    take(0, 0)
    assert not ahead._threads  # a launcher asks once
    for rank, step in [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3), (0, 7), (0, 8), (0, 4)]:
        assert torch.equal(take(rank, step), images.training(index(rank, step), seed=0, rank=rank, step=step))
    by_main = {(rank, step) for thread, rank, step in made if thread == threading.get_ident()}
    assert by_main == {(0, 0), (0, 1), (1, 1), (1, 2), (0, 7), (0, 8), (0, 4)}
    for executor in ahead._threads.values():
        executor.shutdown()


def test_a_fault_ahead_is_raised_at_its_own_step():
    ahead = Ahead()

    def make(index, seed, rank, step):
        if step == 3:
            raise ValueError("n7.JPEG is no readable image")
        return index

    for step in range(3):
        ahead.take(make, torch.arange(2), lambda: torch.arange(2), 0, 0, step)
    with pytest.raises(ValueError, match=r"n7\.JPEG"):
        ahead.take(make, torch.arange(2), lambda: torch.arange(2), 0, 0, 3)
    for executor in ahead._threads.values():
        executor.shutdown()


def test_the_policy_has_the_25_pairs_of_the_paper():
    assert len(POLICY) == 25 and {name for pair in POLICY for name, _, _ in pair} == set(OPERATIONS)
    assert POLICY[0] == (("posterize", 0.4, 8), ("rotate", 0.6, 9))
    assert POLICY[18] == (("shear-x", 0.6, 5), ("equalize", 1.0, 0))


def test_each_operation_does_what_its_name_says():
    ramp = np.tile(np.arange(0, 256, 8, dtype=np.uint8), (32, 1))
    picture = Image.fromarray(np.stack([ramp, ramp // 2, ramp.T], axis=2))
    before = np.asarray(picture).astype(int)

    def after(name, level, sign=1):
        return np.asarray(OPERATIONS[name](picture, level, sign)).astype(int)

    assert np.array_equal(after("invert", 0), 255 - before)
    assert np.array_equal(after("posterize", 8), before & 0b11110000)
    assert np.array_equal(after("posterize", 5), before & 0b11111100)
    assert np.array_equal(after("solarize", 5), np.where(before >= 114, 255 - before, before))
    assert np.array_equal(after("rotate", 0), before) and not np.array_equal(after("rotate", 9), before)
    assert not np.array_equal(after("rotate", 9, -1), after("rotate", 9))
    assert abs(after("shear-x", 9)[0] - before[0]).max() <= 2  # between pixels: it begins half a row further down
    assert (after("shear-x", 9)[31, -5:] == 128).all() and (after("shear-x", 9, -1)[31, :5] == 128).all()
    assert after("color", 9, -1).std(2).mean() < before.std(2).mean() < after("color", 9).std(2).mean()
    assert after("contrast", 9, -1).std() < before.std() < after("contrast", 9).std()
    edge = Image.fromarray(np.repeat(np.repeat(np.uint8([[[50], [150]]]), 8, 1), 8, 0).repeat(3, 2))
    steps = {sign: np.asarray(OPERATIONS["sharpness"](edge, 9, sign))[4, 7:9, 0] for sign in (1, -1)}
    assert steps[1][0] < 50 < steps[-1][0] < steps[-1][1] < 150 < steps[1][1]
    assert after("autocontrast", 0).max() == 255 and after("equalize", 0).max() == 255


def test_autoaugment_draws_for_each_image_by_itself():
    picture = torch.from_numpy(pictures_of_the_subset()[0])[30]
    images = picture.expand(400, -1, -1, -1)
    found = autoaugment(images, **KEY)
    assert found.shape == images.shape and found.dtype == torch.uint8
    assert torch.equal(found, autoaugment(images, **KEY))
    assert not torch.equal(found, autoaugment(images, **KEY | {"step": 4}))
    # 25 pairs, each operation made or not, some to either side: far more than 40 outcomes, far fewer than images.
    assert 40 < len({image.numpy().tobytes() for image in found}) < 400
    with pytest.raises(ValueError, match="needs RGB images"):
        autoaugment(images[:, :1], **KEY)


def test_mixup_mixes_images_and_labels_alike():
    inputs, labels = torch.eye(8)[:, :, None, None], torch.arange(8)
    shares = []
    for step in range(400):
        images, targets = mixed(inputs, labels, 8, 0.5, seed=0, rank=0, step=step)
        assert torch.equal(images[:, :, 0, 0], targets)  # here a label says what the image is
        torch.testing.assert_close(targets.sum(1), torch.ones(8))
        shares.append(streams.beta(0.5, streams.SHARE, 0, 0, step))
    # Beta(0.5, 0.5) has mean 1/2 and variance 1/8; 400 draws: standard errors of 0.018 and about 0.005.
    assert abs(np.mean(shares) - 0.5) < 0.06 and abs(np.var(shares) - 0.125) < 0.02
    uniform = [streams.beta(1.0, 9, step) for step in range(400)]
    assert abs(np.var(uniform) - 1 / 12) < 0.015


def test_faults_in_a_folder_are_one_sentence(tmp_path, folder):
    def fails(path, match):
        with pytest.raises(ValueError, match=match) as error:
            load_image_folder(path, 16).training(torch.arange(41), **KEY)
        assert "\n" not in str(error.value)

    fails(None, "needs --data FOLDER")
    fails(str(tmp_path), re.escape("does not hold images in train/<class>/"))
    shutil.copytree(folder, tmp_path / "x")
    (tmp_path / "x" / "train" / "cat" / "n01_1.JPEG").write_bytes(b"no picture")
    fails(str(tmp_path / "x"), "n01_1.JPEG is no readable image")
    (tmp_path / "x" / "train" / "cat").rename(tmp_path / "cat")
    fails(str(tmp_path / "x"), "images of class 'cat' but no training images")
    shutil.rmtree(tmp_path / "x" / "val")
    (tmp_path / "x" / "val" / "dog").mkdir(parents=True)
    fails(str(tmp_path / "x"), "0 validation images")


def test_flags_of_other_tasks_are_refused(folder):
    with pytest.raises(ValueError, match="--context means nothing to task image-folder: it is for text and hf-text"):
        load_task("image-folder", str(folder), Reading(context=8))
    with pytest.raises(ValueError, match="--image-size means nothing to task cifar10"):
        load_task("cifar10", str(folder), Reading(image_size=8))
