"""Paths that are URLs."""

from __future__ import annotations

import copy
from pathlib import Path

import fsspec
import pytest

from glassengine.errors import UsageError
from glassengine.stores.places import Remote, place, remote

pytestmark = pytest.mark.usefixtures("nothing_in_memory")


@pytest.mark.parametrize("given", ["run", "a:b", "/tmp/s3://x", "./s3:/x", "C:/run", "C:\\run", "run:", Path("x")])
def test_paths_are_paths(given: str | Path) -> None:
    assert place(given) == Path(given) and not isinstance(place(given), Remote)
    assert remote(given) is None


@pytest.mark.parametrize("given", ["file:///tmp/run", "local:///tmp/run", "FILE:/tmp/run"])
def test_a_file_address_is_a_path(given: str) -> None:
    assert place(given) == Path("/tmp/run")


@pytest.mark.parametrize("given", ["s3://bucket/run", "s3://bucket/run/", Path("s3://bucket/run"), "S3:/bucket/run"])
def test_a_url_is_a_path_whose_text_is_the_url(given: str | Path) -> None:
    found = place(given)
    assert isinstance(found, Remote) and str(found) == f"{found}" == "s3://bucket/run"
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
