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
from torch import nn

import glassengine as glass
from glassengine.cli.main import main
from glassengine.environment import SnapshotRequest
from glassengine.errors import UsageError
from glassengine.executable.cache_store import Store
from glassengine.executable.snapshot.snapshots import policy_of
from glassengine.writing import (
    ASIDE,
    aside,
    exchange,
    held,
    hold,
    local,
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
def largest_file(num_bytes: int) -> Iterator[None]:
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
    with largest_file(num_bytes), pytest.raises(OSError, match="File too large") as caught:
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


@pytest.mark.parametrize("given", ["s3://bucket/run", "gs://b/r", Path("s3://bucket/run")])
def test_f22_places_in_stores_are_no_paths(given: str | Path) -> None:
    with pytest.raises(UsageError, match="only files of this machine") as raised:
        local(given)
    assert "://" in str(raised.value) and "mount it" in str(raised.value)


def test_f22_a_file_address_is_a_path() -> None:
    assert local("file:///tmp/run") == Path("/tmp/run")


@pytest.mark.parametrize("given", ["run", "a:b", "/tmp/s3://x", "./s3:/x", "C:/run", "C:\\run", "run:", Path("x")])
def test_paths_are_paths(given: str | Path) -> None:
    assert local(given) == Path(given)


URL = "hdfs://host/run"


@pytest.mark.parametrize(
    "command",
    [
        ["record", "-o", URL, "--", "script.py"],
        ["record", "-o", URL, "net.py:model", "--inputs", "net.py:inputs"],
        ["build", "net.py:model", URL],
        ["build", "net.py:model", "--dry-run", "-o", URL],
        ["build", "net.py:model", "--artifacts", URL],
        ["check", "net.py:model", f"--json={URL}"],
        ["check", "net.py:model", "--reproduction", URL],
        ["compare", "a", "b", f"--json={URL}"],
        ["show", "x.pt", "--export", URL],
    ],
)
def test_f22_every_command_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print(1)\n")
    (tmp_path / "net.py").write_text(
        "import torch\nmodel = torch.nn.ReLU\ndef inputs():\n    return {'input': torch.ones(2)}\n"
    )
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    assert main(command) == 2
    assert "not in a store that can be used" in capsys.readouterr().err
    assert not list(tmp_path.glob("*:*"))


def test_f22_calls_that_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = nn.ReLU()
    for url, why in ((URL, "not in a store that can be used"), ("s3://bucket/run", "only files of this machine")):
        for call in (
            lambda url=url: glass.snapshots.take(url),
            lambda url=url: glass.profiler.start_server(0, directory=url),
            lambda url=url: glass.compat.model_addition_debugger_context(net, url).__enter__(),
        ):
            with pytest.raises(UsageError, match=why):
                call()
    for call in (
        lambda: glass.record(net, URL).__enter__(),
        lambda: glass.record(net, Path(URL)).__enter__(),
        lambda: glass.profiler.profile(URL).__enter__(),
        lambda: glass.compat.StepFiles(URL),
    ):
        with pytest.raises(UsageError, match="not in a store that can be used"):
            call()
    assert not list(tmp_path.iterdir())


def test_f22_directories_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEBUG_ARTIFACTS_DIR", URL)
    with pytest.raises(UsageError, match="not in a store that can be used"):
        glass.build(nn.ReLU(), inputs={"input": torch.ones(2)}, backend="eager")
    request = SnapshotRequest(f"--xla_dump_hlo_snapshots --xla_dump_to={URL}", "", "", "")
    assert policy_of(request, str(tmp_path)) is None and "no snapshots are taken" in caplog.text
    with pytest.raises(UsageError, match="only files of this machine"):
        Store(Path("s3://bucket/run"))
    assert not list(tmp_path.iterdir())
