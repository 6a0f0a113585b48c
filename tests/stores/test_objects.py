"""Objects of a store: what is there, and every way in which a store fails."""

from __future__ import annotations

import sys
from pathlib import Path

import fsspec
import pytest

from glassengine.errors import CorruptError, UsageError
from glassengine.stores import objects

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


def test_what_is_missing_is_named_with_what_is_near() -> None:
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
