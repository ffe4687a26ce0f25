"""Bad input of every kind that bench/fuzz.py found to end in something else than one sentence."""

import gzip
import io
import json
import pickle
import struct
import subprocess
import sys
import tarfile
import zlib

import numpy as np
import pytest
import torch
from compare_study import STUDY, recorded
from PIL import Image
from safetensors.torch import save_file

from dlion.cli import main, sentence
from dlion.errors import CheckpointError
from dlion.train import checkpoints
from dlion.train.compare.cells import first_stage
from dlion.train.compare.study import read_study
from dlion.train.compare.wholeness import is_whole
from dlion.train.config import asked_by, read_toml
from dlion.train.data import cache, fashion, inert_pickle, pictures
from dlion.train.data.instructions import _texts
from dlion.train.data.picture import decoded
from dlion.train.json_text import from_json
from dlion.train.legal import require, shown
from dlion.train.optional import Refused, reading
from dlion.train.recipes import read_recipe
from dlion.train.weights import load_weights

DEEP = "[" * 100_000


class PanicException(BaseException):
    """As packages written in Rust raise it."""


def read(error):
    with reading("the file x", "fetch it again"):
        raise error


RAISED = [PanicException("range end\nout of range"), KeyError("a"), json.JSONDecodeError("a", "b", 0)]


@pytest.mark.parametrize("error", RAISED)
def test_whatever_a_package_raises_is_one_sentence(error):
    assert refused(read, error).startswith("the file x cannot be read (")


def test_what_is_no_damage_passes():
    assert refused(read, Refused("a row has no text in it")) == "a row has no text in it"
    for error in (KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises(type(error)):
            read(error)


def refused(call, *arguments):
    """The sentence with which something is refused, which is exactly a ValueError and no kind of it."""
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert type(caught.value) is ValueError and text.isprintable() and 10 < len(text) < 1200, text
    return text


def test_what_damaged_weights_hold_is_not_printed_as_it_is(tmp_path):
    model, file = torch.nn.Linear(2, 2), tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2, 2), "b\x07\0ias": torch.zeros(2)}, file)
    assert "holds another model" in refused(load_weights, model, file)


@pytest.mark.parametrize("told", ["\0", None, 3, {"step": 1}, {"step": 5}, {"step": 1, "x" * 999: 1}])
def test_progress_that_is_none(told):
    told = {**told, "seconds": "long"} if told == {"step": 1} else told
    with pytest.raises(CheckpointError) as caught:
        checkpoints._progress(told, 1)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_lists_within_lists_without_end(tmp_path):
    assert "too deep" in refused(from_json, DEEP)
    assert "no text in UTF-8" in refused(from_json, b"\xff\xfe\xfd")
    for name in ("deep.toml", "tables.toml"):
        (tmp_path / name).write_text(f"a = {DEEP}" if name == "deep.toml" else "a = " + "{a=" * 50_000)
        assert "is not valid TOML" in refused(read_toml, tmp_path / name)


@pytest.mark.parametrize("flag", ["lr", "weight-decay", "clip-norm", "betas"])
def test_an_integer_that_no_float_can_hold(flag):
    assert f"{flag} cannot be" in refused(asked_by, {flag: [10**400, 0] if flag == "betas" else 10**400})


def test_a_long_or_unprintable_value_is_not_repeated_whole(tmp_path, capsys):
    assert len(refused(asked_by, {"device": "x" * 5000})) < 300
    assert (
        refused(require, False, "steps", "a\x00b", "at least 1") == "--steps must be at least 1, and a\\x00b was given."
    )
    assert "a number of" in shown(10**5000)
    assert len(sentence("x" * 5000)) < 1010 and sentence("a \0 and\nb") == "a \\x00 and b"
    (tmp_path / "study.toml").write_text(f'metric = "{"m" * 5000}"\n[vary]\nmethod = ["dlion-mavo"]\nseed = [1]')
    assert len(refused(read_study, tmp_path / "study.toml")) < 700
    assert main(["train", "--steps", "7" * 5000]) == 2
    assert len(capsys.readouterr().err) < 1100


def test_a_recipe_whose_method_is_a_list(tmp_path):
    (tmp_path / "one.toml").write_text('method = ["dlion-mavo"]\n[with.dlion-mavo]\nlr = 1.0')
    assert read_recipe(tmp_path / "one.toml").flags_of(None) == {"method": ["dlion-mavo"]}


@pytest.mark.parametrize(
    "change", [{"data": {"name": 1}}, {"data": {}}, {"steps": 10**400}, {"val_loss": float("inf")}]
)
def test_a_cell_of_which_no_table_can_be_made(change):
    record = recorded(first_stage(STUDY)[0], 0.5)
    assert is_whole(record) and not is_whole({**record, **change})


def test_an_idx_file_of_many_dimensions():
    content = bytes((0, 0, 8, 255)) + b"\xff" * 2000
    assert "an array of 255 dimensions" in refused(fashion.parse_idx, content, "x")


def test_an_idx_file_of_no_dimension_among_good_ones(tmp_path):
    for name in fashion.FILES:
        (tmp_path / name).write_bytes(b"\0\0\x08\0\x05")
    assert "have 0 and 0 dimensions" in refused(fashion.load_fashion, str(tmp_path))


def test_a_small_file_that_becomes_a_large_one(tmp_path, monkeypatch):
    monkeypatch.setattr(fashion, "MOST_BYTES", 2**24)
    path = tmp_path / "large.gz"
    path.write_bytes(gzip.compress(bytes(2**25 + 1)))
    assert "unpacks to more than 16,777,216 bytes" in refused(fashion._read_bytes, path)
    monkeypatch.setattr(pictures, "MOST_BYTES", 1000)
    with tarfile.open(tmp_path / "large.tar", "w") as tar:
        entry = tarfile.TarInfo("train/cat/0.png")
        entry.size = 2000
        tar.addfile(entry, io.BytesIO(bytes(2000)))
    assert "2,000 bytes, too many for an image" in refused(list, pictures._archive_members(tmp_path / "large.tar"))


def png(width, height):
    """The beginning of a picture that says it has this size."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + bytes(20)


@pytest.mark.parametrize("size", [(12_000, 12_000), (2**31 - 1, 2**31 - 1), (0, 5)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_that_says_it_is_huge(size):
    assert "x is no readable image" in refused(decoded, io.BytesIO(png(*size)), "x")


def test_a_picture_of_usual_size_is_taken():
    file = io.BytesIO()
    Image.new("L", (60, 50)).save(file, "PNG")
    assert decoded(file, "x").size == (60, 50)


@pytest.mark.parametrize("place", [6, 10])  # the version that is needed, the method of compression
def test_arrays_in_the_cache_that_ask_for_what_zipfile_cannot_do(tmp_path, place):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.zeros(3))
    assert cache._read(path) is not None
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + place] = 0x63
    path.write_bytes(content)
    assert cache._read(path) is None


GREEDY = b"\x80\x02]r\xff\xff\xff\x7f."  # an empty list, remembered at place 2**31 - 1


@pytest.mark.processes
def test_a_pickle_cannot_ask_for_memory():
    """That of C would make room for four billion objects: here within 1 GB, in a process of its own."""
    code = (
        "import resource, sys; from dlion.train.data import inert_pickle;"
        f"resource.setrlimit(resource.RLIMIT_AS, ({2**31}, {2**31}));"
        f"print(inert_pickle.load({GREEDY!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[]\n", done.stderr


def test_what_a_pickle_asks_for_is_not_repeated_whole():
    content = b"c" + b"m" * 3000 + b"\n" + b"n" * 3000 + b"\n."
    assert len(refused(inert_pickle.load, content)) < 200
    assert inert_pickle.load(pickle.dumps({"a": [1, 2]})) == {"a": [1, 2]}


@pytest.mark.parametrize("row", ["\x00", {"\x00": 1}, {"instruction": "a", "output": "\ud800"}, ["x" * 500]])
def test_instructions_that_are_no_text(row):
    told = refused(_texts, json.loads(json.dumps(row)), "x.jsonl")
    assert told.startswith("a row of x.jsonl")
