"""Text: the standard library without tests, files, folders and token files, and how each is split."""

import numpy as np
import pytest

from dlion.train.data import tokens
from dlion.train.data.text import load_text


def one_sentence(error):
    message = str(error.value)
    assert "\n" not in message and len(message) < 900
    return message


def test_the_standard_library_is_read_without_tests_and_packages():
    found = load_text()
    assert found.unit == "byte" and found.vocabulary == 256 and found.train.dtype == np.uint8
    size = len(found.train) + len(found.valid)
    assert 5_000_000 < size < 20_000_000  # site-packages alone would be far more
    assert 0.02 < len(found.valid) / size < 0.3
    both = found.train.tobytes() + found.valid.tobytes()
    assert b"def namedtuple(" in both
    assert b"class CmdLineTest(unittest.TestCase)" not in both and b"def cross_entropy(" not in both
    assert load_text().sha256 == found.sha256 and len(found.sha256) == 64


def test_a_folder_is_split_by_file_the_same_way_each_time(tmp_path):
    for number in range(20):
        path = tmp_path / "texts" / str(number % 3) / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{number}>" * 50)
    (tmp_path / "texts" / "image.png").write_bytes(b"\x89PNG\0\0\0")
    (tmp_path / "texts" / ".git").mkdir()
    (tmp_path / "texts" / ".git" / "config").write_text("hidden")
    found = load_text(str(tmp_path / "texts"))
    assert "18 files" in found.note and "2 files" in found.note and "1 empty or binary" in found.note
    for number in range(20):  # whole files, on one side
        content = f"<{number}>".encode() * 50
        assert (content in found.train.tobytes()) != (content in found.valid.tobytes())
    assert b"hidden" not in found.train.tobytes() + found.valid.tobytes()
    assert load_text(str(tmp_path / "texts")).sha256 == found.sha256


@pytest.mark.parametrize("as_folder", [False, True])
def test_one_file_is_split_at_the_end(tmp_path, as_folder):
    (tmp_path / "texts").mkdir()
    path = tmp_path / "texts" / "one.txt"
    path.write_bytes(bytes(range(1, 101)))
    found = load_text(str(path.parent if as_folder else path))
    assert found.train.tolist() == list(range(1, 91)) and found.valid.tolist() == list(range(91, 101))
    assert "the last 10 to validate" in found.note


def test_token_files(tmp_path):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "train.bin")
    alone = load_text(str(tmp_path / "train.bin"))
    assert alone.vocabulary == 50257 and alone.unit == "token"
    assert alone.train.tolist() == list(range(900)) and alone.valid.tolist() == list(range(900, 1000))
    np.arange(500, dtype="<u2").tofile(tmp_path / "val.bin")
    for given in (tmp_path, tmp_path / "train.bin"):
        both = load_text(str(given))
        assert (len(both.train), len(both.valid)) == (1000, 500)
        assert both.sha256 != alone.sha256


def with_header(path, values, magic=20240520, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(values)
    path.write_bytes(header.tobytes() + np.asarray(values, dtype).tobytes())


def test_token_files_with_the_header_of_llm_c_in_several_files(tmp_path):
    with_header(tmp_path / "web_train_000001.bin", range(300))
    with_header(tmp_path / "web_train_000002.bin", range(300, 700))
    with_header(tmp_path / "web_val_000000.bin", range(900, 1000))
    found = load_text(str(tmp_path))
    assert (len(found.train), len(found.valid), found.vocabulary) == (700, 100, 50257)
    assert "and 1 more files" in found.note
    positions = np.arange(650).reshape(-1, 1) + np.arange(50)
    assert np.array_equal(found.train[positions], positions)  # windows may lie in both files
    assert np.array_equal(found.train[250:350], np.arange(250, 350)) and found.train[5:5].size == 0
    one = load_text(str(tmp_path / "web_val_000000.bin"))
    assert (len(one.train), len(one.valid)) == (90, 10) and one.train[0] == 900
    with_header(tmp_path / "llama.bin", [128_000] * 50, magic=20240801, dtype="<u4")
    assert load_text(str(tmp_path / "llama.bin")).vocabulary == 128_256
    with_header(tmp_path / "web_train_000003.bin", [1] * 50, magic=20240801, dtype="<u4")
    with pytest.raises(ValueError, match="of different kinds"):
        load_text(str(tmp_path))
    whole = (tmp_path / "llama.bin").read_bytes()
    (tmp_path / "llama.bin").write_bytes(whole[:-4])
    with pytest.raises(ValueError, match="header asks for 1,224"):
        load_text(str(tmp_path / "llama.bin"))
    for cut in (whole[:4], whole[:501], whole[:1000], whole[:8] + bytes(1016)):  # they would pass for GPT-2 tokens
        (tmp_path / "llama.bin").write_bytes(cut)
        with pytest.raises(
            ValueError, match=r"header of llm\.c that is cut short or tells of no tokens; fetch it again"
        ):
            load_text(str(tmp_path / "llama.bin"))


def test_files_read_as_one_have_the_digest_of_one_file(tmp_path):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "train.bin")
    whole = np.arange(1000, dtype="<u2")
    parts = tokens.Joined([whole[:10], whole[:0], whole[10:900]])
    assert tokens.digest_of(parts, whole[900:])[0] == load_text(str(tmp_path)).sha256


def test_large_token_files_are_digested_by_samples_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "_SAMPLED_ABOVE", 100)
    monkeypatch.setattr(tokens, "_BLOCK", 4)
    np.arange(1000, dtype="<u2").tofile(tmp_path / "train.bin")
    found = load_text(str(tmp_path / "train.bin"))
    assert "sampled" in found.note
    np.arange(1, 1001, dtype="<u2").tofile(tmp_path / "train.bin")
    assert load_text(str(tmp_path / "train.bin")).sha256 != found.sha256


@pytest.mark.parametrize("content", [b"", b"abc"])
def test_token_files_of_odd_length_are_refused(tmp_path, content):
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(ValueError, match="uint16") as error:
        load_text(str(tmp_path))
    one_sentence(error)


def test_missing_and_empty_texts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no text at --data"):
        load_text(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="holds no text files"):
        load_text(str(tmp_path))
