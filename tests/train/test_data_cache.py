"""The cache of decoded arrays: made once however many ask, never half, never silently absent."""

import threading

import numpy as np
import pytest

from dlion.train.data import cache


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_many_at_once_make_the_arrays_once(tmp_path):
    made = []
    start = threading.Barrier(4)

    def make():
        made.append(1)
        return {"x": np.arange(10)}

    results = []

    def work():
        start.wait()
        results.append(cache.cached_arrays("key", make)[0]["x"].sum())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [45] * 4 and len(made) == 1
    assert sorted(path.name for path in (tmp_path / "cache" / "dlion").iterdir()) == ["key.lock", "key.npz"]


def test_a_damaged_cache_file_is_made_again(tmp_path):
    path = tmp_path / "cache" / "dlion" / "key.npz"
    cache.cached_arrays("key", lambda: {"x": np.arange(1000)})
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[500] ^= 1
    for content in (whole[:-100], b"", bytes(flipped)):
        path.write_bytes(content)
        assert cache.cached_arrays("key", lambda: {"x": np.arange(7)})[0]["x"].tolist() == list(range(7))


def test_an_unwritable_cache_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    arrays, where = cache.cached_arrays("key", lambda: {"x": np.arange(3)})
    assert arrays["x"].tolist() == [0, 1, 2] and "for this run only" in where


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    _, where = cache.cached_arrays("key", lambda: {"x": np.arange(3)})
    assert "No space left" in where
    assert [path.name for path in (tmp_path / "cache" / "dlion").iterdir()] == ["key.lock"]
