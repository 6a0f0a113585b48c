"""Files that appear whole or not at all, and what is put away."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glassengine.writing.files import (
    ASIDE,
    aside,
    exchange,
    held,
    hold,
    next_directory,
    open_for_torch,
    private_directory,
    put_away,
    remove_tree,
    save_safetensors,
)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("before")
    with pytest.raises(KeyboardInterrupt), aside(target) as path:
        path.write_text("half")
        assert ASIDE.fullmatch(path.name) and target.read_text() == "before"
        raise KeyboardInterrupt
    assert target.read_text() == "before" and list(tmp_path.iterdir()) == [target]
    with aside(target) as path:
        path.write_text("after")
    assert target.read_text() == "after" and list(tmp_path.iterdir()) == [target]


@pytest.mark.skipif(sys.platform != "linux", reason="a system call of Linux")
def test_directories_change_places_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        (path / path.name).touch()
    assert exchange(one, other)
    assert [item.name for path in (one, other) for item in path.iterdir()] == ["other", "one"]
    with pytest.raises(FileNotFoundError):
        exchange(one, tmp_path / "nothing")
    # A system that has no such call.
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    assert not exchange(one, other)
    assert [item.name for path in (one, other) for item in path.iterdir()] == ["other", "one"]


def test_a_directory_is_removed_although_closing_it_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").touch()
    close, failures = os.close, [OSError(errno.EIO, "I/O error")]

    def fail(descriptor: int) -> None:
        close(descriptor)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(os, "close", fail)
    remove_tree(tmp_path / "a")
    assert not failures and not (tmp_path / "a").exists()
    remove_tree(tmp_path / "a")


def test_what_is_put_away_is_numbered_and_keeps_its_order(tmp_path: Path) -> None:
    (tmp_path / "earlier-x").mkdir()
    for number in (1, 2):
        for name in "ab":
            (tmp_path / name).write_text(f"{name}{number}")
        assert put_away(tmp_path, [tmp_path / "a", tmp_path / "b"]) == tmp_path / f"earlier-{number:03d}"
    assert (tmp_path / "earlier-001" / "b").read_text() == "b1"
    (tmp_path / "c").write_text("")
    with pytest.raises(FileNotFoundError):
        put_away(tmp_path, [tmp_path / "missing", tmp_path / "c"])
    assert (tmp_path / "c").exists(), "what comes later stays"


def test_directories_are_numbered_on_from_the_last(tmp_path: Path) -> None:
    assert next_directory(tmp_path, "run", digits=3, first=0).name == "run-000"
    for name in ("run-0041", "run-x", "other-077"):
        (tmp_path / name).mkdir()
    assert next_directory(tmp_path, "run", digits=3).name == "run-042"
    with pytest.raises(FileNotFoundError):
        next_directory(tmp_path / "missing", "run", digits=3)


def test_a_directory_that_appears_meanwhile_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        (tmp_path / f"run-{number:06d}").mkdir()
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(()))  # looked before they were there
    assert next_directory(tmp_path, "run", digits=6).name == "run-000003"


def test_what_is_held_is_held_once_and_let_go_when_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with path.open() as first:
        hold(first.fileno())
        with path.open() as second, pytest.raises(BlockingIOError):
            hold(second.fileno())
    with path.open() as third:
        hold(third.fileno())


def test_a_directory_is_held_while_the_block_runs(tmp_path: Path) -> None:
    with held(tmp_path):
        with pytest.raises(BlockingIOError), held(tmp_path):
            pass
        assert list(tmp_path.iterdir()) == []
    with held(tmp_path):
        pass


@contextlib.contextmanager
def _largest_file(num_bytes: int) -> Iterator[None]:
    """Let writing fail beyond so many bytes of a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _torch_saved(value: torch.Tensor, path: Path) -> None:
    with open_for_torch(path) as file:
        torch.save({"x": value}, file)


def _safetensors_saved(value: torch.Tensor, path: Path) -> None:
    save_safetensors({"x": value}, path, {"k": "v"})


@pytest.mark.parametrize("num_bytes", [0, 10, 700, 100_000])
@pytest.mark.parametrize("save", [_torch_saved, _safetensors_saved])
def test_s10_archives_that_do_not_fit_are_errors_of_the_system(
    tmp_path: Path, num_bytes: int, save: Callable[[torch.Tensor, Path], None]
) -> None:
    """torch ends the process where a write of its own fails while it closes an archive."""
    value = torch.arange(100_000)
    with _largest_file(num_bytes), pytest.raises(OSError, match="File too large") as caught:
        save(value, tmp_path / "x")
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(tmp_path / "x")
    save(value, tmp_path / "y")
    load = torch.load if save is _torch_saved else load_file
    assert torch.equal(load(tmp_path / "y")["x"], value)


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_private_directory_is_private_with_all_that_was_missing(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0o002)
    try:
        private_directory(tmp_path / "a" / "b")
        private_directory(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")]
    assert modes == [0o755, 0o700, 0o700]
