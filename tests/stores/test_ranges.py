"""Bytes of objects by ranges."""

from __future__ import annotations

import os
import random

import pytest

from glassengine.errors import CorruptError
from glassengine.stores import objects, ranges

pytestmark = pytest.mark.usefixtures("nothing_in_memory")
URL = "memory://run/a"


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(ranges, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(ranges, "MAX_BLOCKS", 6)
    ranges._blocks.cache_clear()
    made = random.Random(0).randbytes(20_321)
    objects.write(made, URL)
    return made


def test_every_range(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_MOST_IN_MEMORY", 5000)
    found = objects.require(URL)
    numbers = random.Random(1)
    for _ in range(200):
        start = numbers.randrange(len(data))
        size = numbers.randrange(1, min(9000, len(data) - start) + 1)
        got = ranges.read_range(found, start, size)
        assert bytes(got) == data[start : start + size]
        got[0] ^= 1  # memory of its own
        assert len(ranges._blocks(os.getpid())[0]) <= 6
    with pytest.raises(CorruptError, match="too short"):
        ranges.read_range(found, 20_000, 1000)


def test_blocks_are_fetched_once_and_ahead(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    read = objects.read
    monkeypatch.setattr(objects, "read", lambda *words: asked.append(words[1]) or read(*words))
    found = objects.require(URL)
    for start in range(0, 4000, 10):
        ranges.read_range(found, start, 10)
    assert sorted(asked) == [0, 1000, 2000, 3000, 4000]


def test_a_file_of_an_object(data: bytes) -> None:
    with ranges.open_object(URL) as file:
        assert file.read(1500) == data[:1500]
        file.seek(-7, 2)
        assert file.read() == data[-7:] and file.read(1) == b""
        file.seek(0)
        assert file.read() == data


def test_a_failure_is_not_kept(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    read, failures = objects.read, [CorruptError("planted")]

    def failing(*words: object) -> bytes:
        if failures:
            raise failures.pop()
        return read(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(objects, "read", failing)
    found = objects.require(URL)
    with pytest.raises(CorruptError, match="planted"):
        ranges.read_range(found, 0, 10)
    assert bytes(ranges.read_range(found, 0, 10)) == data[:10]


def test_what_has_changed(data: bytes) -> None:
    found = objects.require(URL)
    assert found.change() is None
    objects.write(data[:-1], URL)
    assert "20,320 bytes" in str(found.change())
    objects.write(data, URL)
    assert found.change() == "it was replaced"
    objects.remove([URL])
    assert found.change() == "it is gone"
