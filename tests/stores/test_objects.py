"""Objects of a store: what is there, and every way in which a store fails."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import fsspec
import pytest

from glassengine.errors import CorruptError, UsageError
from glassengine.stores import objects
from glassengine.stores import objects as ranges

pytestmark = pytest.mark.usefixtures("nothing_in_memory")


def test_an_object_there_and_back(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    objects.put(tmp_path / "a", "memory://run/a")
    objects.write(b"xyz", "memory://run/b")
    assert objects.read("memory://run/a", 3, 6) == b"345"
    assert [(item.name, item.size) for item in objects.listed("memory://run")] == [("a", 10), ("b", 3)]
    objects.fetch("memory://run/b", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"xyz"
    objects.remove(["memory://run/a", "memory://run/a"])
    assert objects.find("memory://run/a") is None and [item.name for item in objects.listed("memory://run")] == ["b"]


def test_missing_objects_are_named_with_near_ones() -> None:
    objects.write(b"x", "memory://run/recording.json")
    with pytest.raises(UsageError, match="no such object") as raised:
        objects.require("memory://run/recoding.json")
    assert "recording.json" in str(raised.value)
    with pytest.raises(UsageError, match="a directory"):
        objects.require("memory://run")
    with pytest.raises(CorruptError, match="no such object"):
        objects.require("memory://run/shard", owned=True)


@pytest.mark.parametrize("name", ["..", "a\\b", "n" * 300])
def test_names_that_no_file_can_have_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fsspec.filesystem("memory")
    monkeypatch.setattr(type(store), "ls", lambda *_, **__: [{"name": f"/run/{name}", "size": 1, "type": "file"}])
    with pytest.raises(CorruptError, match="not a valid file name"):
        objects.listed("memory://run")


def test_an_object_that_is_shorter_than_the_store_said() -> None:
    objects.write(b"123", "memory://run/a")
    with pytest.raises(CorruptError, match="not what the store said"):
        objects.read("memory://run/a", 0, 10)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, name, None)
    for url, extra in (("gs://bucket/run", "gcs"), ("az://bucket/run", "azure")):
        with pytest.raises(UsageError, match="not installed") as raised:
            objects.find(url)
        assert f"glassengine[{extra}]" in str(raised.value.hint)


def test_s3(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    objects.put(tmp_path / "a", f"{bucket}/run/a")
    assert objects.read(f"{bucket}/run/a", 3, 6) == b"345"
    before = objects.find(f"{bucket}/run/a")
    objects.write(b"9876543210", f"{bucket}/run/a")
    after = objects.find(f"{bucket}/run/a")
    assert before is not None and after is not None and before.size == after.size and before.version != after.version
    assert [(item.name, item.is_directory) for item in objects.listed(bucket)] == [("run", True)]
    assert objects.find(f"{bucket}/run") is not None and objects.find(f"{bucket}/ru") is None
    with pytest.raises(UsageError, match="bucket"):
        objects.write(b"x", "s3://no-such-bucket/x")


def test_s3_without_credentials(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    s3fs.S3FileSystem.clear_instance_cache()  # which remember credentials
    with pytest.raises(UsageError, match="cannot be used") as raised:
        objects.write(b"x", f"{bucket}/x")
    assert "AWS_PROFILE" in str(raised.value.hint)
    s3fs.S3FileSystem.clear_instance_cache()


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
