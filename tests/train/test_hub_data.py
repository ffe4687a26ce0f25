"""Hugging Face data sets: a text column with random access or as a stream, through the package itself."""

import json
import re

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from tiny_llama import write_tiny_llama

from dlion.train.config import TrainConfig
from dlion.train.data.encoders import Bytes, encoder
from dlion.train.data.hub import hub_text
from dlion.train.jobs import steps_per_epoch
from dlion.train.judging import EVALUATED_WINDOWS
from dlion.train.reading import Reading
from dlion.train.tasks import load_task

ROWS = [f"Row {number} has {'a lot of ' * (number % 5)}text.\n" for number in range(400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    Dataset.from_dict({"text": ROWS, "url": ["x"] * len(ROWS)}).save_to_disk(folder / "plain")
    halves = {"train": Dataset.from_dict({"text": ROWS[:300]}), "validation": Dataset.from_dict({"text": ROWS[300:]})}
    DatasetDict(halves).save_to_disk(folder / "split")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in ROWS))
    write_tiny_llama(folder / "llama")
    return folder


def as_bytes(rows):
    return [token for row in rows for token in [*row.encode(), 256]]


def test_rows_become_one_run_of_tokens_each_ended(folder):
    found = hub_text(str(folder / "plain"), None, None)
    whole = [*found.train[0 : len(found.train)], *found.valid[0 : len(found.valid)]]
    assert whole == as_bytes(ROWS) and found.vocabulary == 257
    assert len(found.valid) == len(whole) // 10 and "the last tenth to validate" in found.note
    split = hub_text(str(folder / "split"), None, None)
    assert list(split.train[0 : len(split.train)]) == as_bytes(ROWS[:300])
    assert list(split.valid[0 : len(split.valid)]) == as_bytes(ROWS[300:]) and "its validation split" in split.note
    lines = hub_text(str(folder / "rows.jsonl"), "body", None)
    assert list(lines.train[0:50]) == whole[:50] and lines.sha256 == found.sha256


def test_a_tokenizer_from_a_folder_or_its_file(folder):
    by_folder, by_file = encoder(str(folder / "llama")), encoder(str(folder / "llama" / "tokenizer.json"))
    assert by_folder.begin == (0,) and by_folder.end == by_file.end == 1
    assert by_folder(["one bit"]) == by_file(["one bit"]) and max(by_folder(["one bit"])[0]) < by_folder.vocabulary
    assert Bytes()(["é"]) == [[0xC3, 0xA9]]
    found = hub_text(str(folder / "plain"), None, str(folder / "llama"))
    first = by_folder([ROWS[0]])[0]
    assert list(found.train[0 : len(first) + 1]) == [*first, 1] and found.vocabulary == by_folder.vocabulary


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_is_a_function_of_seed_rank_and_step(folder, stream):
    reading = Reading(context=24, stream=stream)

    def task():
        return load_task("hf-text", str(folder / "plain"), reading)

    def draw(task, **changes):
        return task.batch(**{"seed": 1, "rank": 0, "workers": 2, "step": 5, "size": 4} | changes)

    one = task()
    inputs, targets = draw(one)
    assert inputs.shape == targets.shape == (4, 24) and torch.equal(inputs[:, 1:], targets[:, :-1])
    for other in ({"seed": 2}, {"rank": 1}, {"step": 6}):
        assert not torch.equal(draw(one, **other)[0], inputs), other
    assert torch.equal(draw(one)[0], inputs)  # behind the place of a stream: read again from its beginning
    assert torch.equal(draw(task())[0], inputs)  # ahead of it: read on


def test_epochs_need_data_whose_size_is_known():
    assert steps_per_epoch(TrainConfig(epochs=1), (8, 8), 800) == 100
    assert steps_per_epoch(TrainConfig(epochs=1, shared_epochs=True), (8, 8), 801) == 51
    with pytest.raises(ValueError, match="give --steps for a stream"):
        steps_per_epoch(TrainConfig(epochs=1), (8, 8), 0)


def test_a_stream_gives_every_document_to_one_worker_and_none_of_those_held_back(folder):
    text = load_task("hf-text", str(folder / "plain"), Reading(context=8, stream=True)).text
    held = EVALUATED_WINDOWS * 8
    count = next(n for n in range(400) if len(as_bytes(ROWS[:n])) > held)
    assert text.valid.tolist() == as_bytes(ROWS[:count])
    seen = []
    for rank in range(2):
        rows = text.rows(3, rank, 2)
        seen += [bytes(next(rows)[:-1]).decode() for _ in range((400 - count + 1 - rank) // 2)]
    assert sorted(seen) == sorted(ROWS[count:]) and seen != ROWS[count:]
    again = text.rows(3, 0, 2)
    whole = [bytes(next(again)[:-1]).decode() for _ in range(400 - count)]
    half = (400 - count + 1) // 2
    assert whole[:half] == seen[:half] and whole[half:] != whole[:half]  # the next round has another order


def test_a_stream_that_is_too_short_says_so_each_time(folder):
    task = load_task("hf-text", str(folder / "plain"), Reading(context=8, stream=True, eval_windows=10**6))
    for _ in range(2):
        with pytest.raises(ValueError, match="give a longer text, or a smaller --eval-windows"):
            task.batch(seed=0, rank=0, workers=2, step=0, size=1)


def test_windows_of_a_stream_follow_one_another(folder):
    task = load_task("hf-text", str(folder / "split"), Reading(context=16, stream=True))
    assert (
        task.info.train_size == 0
        and task.info.valid_size == (len(as_bytes(ROWS[300:])) - 1) // 16
        and "not stored" in task.info.note
    )
    rows = task.text.rows(0, 1, 2)
    expected = [token for _ in range(12) for token in next(rows)]
    windows = [task.batch(seed=0, rank=1, workers=2, step=step, size=2) for step in range(4)]
    flat = torch.cat([inputs.flatten() for inputs, _ in windows]).tolist()
    assert flat == expected[: len(flat)]
    assert windows[-1][1][-1, -1] == expected[len(flat)]
    with pytest.raises(ValueError, match="leave out --stream"):
        task.batch(seed=0, rank=0, workers=2, step=0, size=1, iid=False)


FAULTS = [
    (None, None, "needs --data"),
    ("plain", "body", "no column 'body', only text, url: name one with --column"),
    ("nowhere.jsonl", None, "cannot be read"),
    ("llama/config.json", "text", "no column 'text'"),
]


@pytest.mark.parametrize(("data", "column", "said"), FAULTS)
@pytest.mark.parametrize("stream", [False, True])
def test_faults_are_one_sentence(folder, data, column, said, stream):
    place = None if data is None else str(folder / data)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load_task("hf-text", place, Reading(column=column, stream=stream, context=8))
    assert "\n" not in str(error.value)


def test_a_missing_package_is_named(monkeypatch, folder):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=re.escape('needs the package datasets: pip install "dlion[hf]"')):
        load_task("hf-text", str(folder / "plain"))


def test_no_array_is_copied(folder):
    found = hub_text(str(folder / "plain"), None, None)
    run = found.train if isinstance(found.train, np.ndarray) else None
    assert run is not None and run.dtype == np.int32


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_without_text_is_named(folder, tmp_path, stream):
    lines = [json.dumps({"text": text}) for text in ["some text"] * 30 + [None]]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="a row has None in the column text, where text is needed") as caught:
        task = load_task("hf-text", str(tmp_path / "rows.jsonl"), Reading(context=8, stream=stream, eval_windows=2))
        for step in range(10):
            task.batch(seed=0, rank=0, workers=1, step=step, size=4)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("damage", ["arrow", "state.json", "parquet"])
def test_damaged_files_of_a_data_set_are_one_sentence(tmp_path, damage):
    rows = Dataset.from_dict({"text": ROWS[:20]})
    place = tmp_path / "set.parquet" if damage == "parquet" else tmp_path / "set"
    rows.to_parquet(place) if damage == "parquet" else rows.save_to_disk(place)
    file = place if damage == "parquet" else next(place.glob(f"*{damage}"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="cannot be read") as caught:
        hub_text(str(place), None, None)
    assert type(caught.value) is ValueError and "\n" not in str(caught.value)
