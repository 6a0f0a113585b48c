"""Paths that are URLs."""

from __future__ import annotations

import copy
from pathlib import Path

import fsspec
import pytest

from glassengine.errors import UsageError
from glassengine.stores import objects
from glassengine.stores.places import RemotePath, delivered, place, remote

pytestmark = pytest.mark.usefixtures("nothing_in_memory")


@pytest.mark.parametrize("given", ["run", "a:b", "/tmp/s3://x", "./s3:/x", "C:/run", "C:\\run", "run:", Path("x")])
def test_paths_are_paths(given: str | Path) -> None:
    assert place(given) == Path(given) and not isinstance(place(given), RemotePath)
    assert remote(given) is None


@pytest.mark.parametrize("given", ["file:///tmp/run", "local:///tmp/run", "FILE:/tmp/run"])
def test_a_file_address_is_a_path(given: str) -> None:
    assert place(given) == Path("/tmp/run")


@pytest.mark.parametrize("given", ["s3://bucket/run", "s3://bucket/run/", Path("s3://bucket/run"), "S3:/bucket/run"])
def test_a_url_is_a_path_whose_text_is_the_url(given: str | Path) -> None:
    found = place(given)
    assert isinstance(found, RemotePath) and str(found) == f"{found}" == "s3://bucket/run"
    assert str(found / "a" / "b.pt") == "s3://bucket/run/a/b.pt" and str(found.parent) == "s3://bucket"
    assert place(found) is found and place(str(found)) == found == remote(given)
    assert found.absolute() == found.resolve() == copy.copy(found) == found


@pytest.mark.parametrize("given", ["hdfs:/x/y", "https://host/x", "s4://bucket/run"])
def test_other_addresses_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="not in a store") as raised:
        place(given)
    assert "s3://" in str(raised.value) and remote(given) is None


@pytest.mark.parametrize("given", ["s3://b/../other", "s3://b/a/../../c", "s3://b/a::zip://x", "s3://b/a\0b"])
def test_addresses_that_lead_elsewhere_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="not a place in a store"):
        place(given)


def test_what_is_there() -> None:
    store = fsspec.filesystem("memory")
    for name in ("rank0/recording.json", "rank1/recording.json", "other.txt"):
        store.pipe_file(f"/run/{name}", b"x")
    there = place("memory://run")
    assert there.is_dir() and not there.is_file() and (there / "other.txt").is_file()
    assert [item.name for item in there.iterdir()] == ["other.txt", "rank0", "rank1"]
    assert [str(item) for item in there.glob("rank*/recording.json")] == [
        "memory://run/rank0/recording.json",
        "memory://run/rank1/recording.json",
    ]
    assert [item.name for item in there.glob("*.txt")] == ["other.txt"]
    missing = there / "none"
    assert not (missing.exists() or missing.is_dir() or missing.is_file() or list(missing.iterdir()))


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLASS_SPOOL_DIR", str(tmp_path / "spool"))
    return tmp_path / "spool"


def test_a_path_of_this_machine_is_itself(tmp_path: Path) -> None:
    with delivered(tmp_path / "x") as path:
        assert path == tmp_path / "x"


def test_a_directory_goes_as_a_whole_and_its_note_last(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, order = objects.put, []
    monkeypatch.setattr(objects, "put", lambda path, url: order.append(url) or put(path, url))
    objects.write(b"old", "memory://run/old/x")
    with delivered("memory://run", last="engine.json", replace=True) as path:
        (path / "inner").mkdir(parents=True)
        for name in ("engine.json", "a", "z", "inner/b"):
            (path / name).write_text(name)
    assert order[-1] == "memory://run/engine.json" and len(order) == 4
    assert objects.read("memory://run/inner/b", 0, 7) == b"inner/b"
    assert objects.find("memory://run/old/x") is None, "it belongs to what was replaced"
    assert list(spool.iterdir()) == []


def test_a_file(spool: Path) -> None:
    with delivered("memory://run/a.npz") as path:
        path.write_text("x")
    assert objects.read("memory://run/a.npz", 0, 1) == b"x"
    with pytest.raises(UsageError, match="exists already"), delivered("memory://run/a.npz", overwrite=False) as path:
        path.write_text("y")
    assert objects.read("memory://run/a.npz", 0, 1) == b"x"


def test_nothing_goes_where_the_block_fails(spool: Path) -> None:
    with pytest.raises(RuntimeError), delivered("memory://run") as path:
        path.mkdir()
        (path / "a").write_text("x")
        raise RuntimeError
    assert objects.find("memory://run") is None and list(spool.iterdir()) == []
