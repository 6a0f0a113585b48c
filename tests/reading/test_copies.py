"""Copies of objects on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from glassengine.errors import CorruptError, UsageError
from glassengine.reading import copies
from glassengine.reading.copies import here
from glassengine.stores import objects

pytestmark = pytest.mark.usefixtures("nothing_in_memory")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(copies, "_held", {})
    return tmp_path / "cache" / "objects"


def write(url: str, **contents: str) -> None:
    for name, text in contents.items():
        objects.write(text.encode(), f"{url}/{name}")


def test_a_path_of_this_machine_is_itself(tmp_path: Path) -> None:
    assert here(tmp_path) == tmp_path and here("file:///x") == Path("/x") and here("run") == Path("run")


def test_a_directory_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    write("memory://run", a="one", b="two")
    write("memory://run/inner", c="three")
    found = here("memory://run")
    assert {str(path.relative_to(found)): path.read_text() for path in found.rglob("*") if path.is_file()} == {
        "a": "one",
        "b": "two",
        "inner/c": "three",
    }
    assert found.name == "run"
    fetch, fetched = objects.fetch, []
    monkeypatch.setattr(objects, "fetch", lambda url, path: fetched.append(url) or fetch(url, path))
    assert here("memory://run") == found and fetched == []
    # What has changed is another copy: the one in use stays as it is.
    write("memory://run", a="ONE")
    other = here("memory://run")
    assert other != found and (other / "a").read_text() == "ONE" and (found / "a").read_text() == "one"
    assert here("memory://run/inner/c").read_text() == "three"


def test_a_copy_that_was_changed_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    write("memory://run", a="one")
    (here("memory://run") / "a").write_text("two")
    assert (here("memory://run") / "a").read_text() == "one" and "has changed" in caplog.text


def test_copies_are_bounded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASS_STORE_CACHE_BYTES", "2500")
    for number in range(4):
        write(f"memory://run{number}", a="x" * 1000)
        here(f"memory://run{number}")
        for lock in copies._held.values():
            os.close(lock)
        copies._held.clear()
        time.sleep(0.02)
    assert len(list(cache.iterdir())) == 2
    # What is in use is not removed.
    kept = here("memory://run3")
    write("memory://run4", a="x" * 2000)
    here("memory://run4")
    assert (kept / "a").is_file()
    write("memory://run5", a="x" * 3000)
    with pytest.raises(UsageError, match="too much") as raised:
        here("memory://run5")
    assert "GLASS_STORE_CACHE_BYTES" in str(raised.value.hint)


def test_an_object_that_changes_while_it_is_copied(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("memory://run", a="one", b="two")
    fetch = objects.fetch

    def replaced(url: str, path: Path) -> None:
        fetch(url, path)
        objects.write(b"new", url)

    monkeypatch.setattr(objects, "fetch", replaced)
    with pytest.raises(CorruptError, match="it was replaced"):
        here("memory://run")
    assert not list(cache.glob("*/*/note.json"))


def test_an_object_that_is_cut_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    write("memory://run", a="one")
    monkeypatch.setattr(objects, "fetch", lambda url, path: path.write_bytes(b"on"))
    with pytest.raises(CorruptError, match="2 bytes came"):
        here("memory://run")


def test_an_object_that_is_a_directory_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    write("memory://run", a="one")
    found = objects.require("memory://run/a")
    monkeypatch.setattr(objects, "below", lambda _: iter([("a", found), ("a/b", found)]))
    with pytest.raises(CorruptError, match="directory as well"):
        here("memory://run")


def test_too_many_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MAX_FILES", 1)
    write("memory://many", a="", b="")
    with pytest.raises(CorruptError, match="too many"):
        here("memory://many")


def test_what_is_not_there() -> None:
    write("memory://run", engine="x")
    with pytest.raises(UsageError, match="no such object") as raised:
        here("memory://run/engin")
    assert "engine" in str(raised.value.expected)


@pytest.mark.parametrize("kind", ["file", "directory", "note", "pipe", "short", "deep", "other"])
def test_a_copy_is_made_again_where_something_else_is_in_its_place(cache: Path, tmp_path: Path, kind: str) -> None:
    write("memory://run", a="one")
    write("memory://run/inner", c="three")
    found = here("memory://run")
    note = next(cache.glob("*/*/note.json"))
    place = {"file": found / "a", "directory": found / "inner"}.get(kind, note)
    aside = tmp_path / "aside"
    place.rename(aside)
    if kind in ("file", "directory", "note"):
        place.symlink_to(aside)
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.write_text({"short": "{}", "deep": "[" * 100_000, "other": '{"../../../aside": [3, 5]}'}[kind])
    again = here("memory://run")
    assert again == found and (again / "inner/c").read_text() == "three"
    assert not any(path.is_symlink() for path in [again / "a", again / "inner", note]) and note.is_file()


def test_a_pipe_among_the_copies_stops_nobody(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    os.mkfifo(cache / "pipe")
    write("memory://run", a="one")
    monkeypatch.setenv("GLASS_STORE_CACHE_BYTES", "10")
    assert (here("memory://run") / "a").read_text() == "one"
