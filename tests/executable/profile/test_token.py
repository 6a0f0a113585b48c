"""The token of a profile server: only its user can read it, and clients of that user find it by themselves."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from glassengine.errors import CorruptError, UsageError
from glassengine.executable.cache.store import Store
from glassengine.executable.profile.token import Entry, TokenFile, new_token, running, token_of, write
from tests import children

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="modes of files are those of POSIX")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    return tmp_path / "cache"


def written(port: int = 9012, path: Path | None = None) -> tuple[str, TokenFile]:
    token = new_token()
    return token, write(Entry(port, token, os.getpid()), path)


def test_s5_only_the_user_reads_it_whatever_the_umask(tmp_path: Path) -> None:
    for mask in (0o000, 0o022, 0o077):
        before = os.umask(mask)
        try:
            token, named = written(path=tmp_path / f"{mask}" / "token")
            _, usual = written()
        finally:
            os.umask(before)
        assert token_of(9012, named.path) == token and len(token) >= 43
        for file in (named, usual):
            assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
            assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
            file.remove()
            assert not file.path.exists()


def test_s5_a_client_of_the_same_user_finds_it(cache: Path) -> None:
    token, file = written()
    assert file.path.is_relative_to(cache) and token_of(9012, None) == token
    assert [entry.port for entry in running()] == [9012]
    with pytest.raises(UsageError, match=r"(?s)on port 9013.*localhost:9012"):
        token_of(9013, None)
    file.remove()
    assert not running()


def test_s5_the_cache_of_compiled_graphs_beside_it_stays_trusted(cache: Path) -> None:
    """Where the group may write, as many systems have it, the server made a cache that was then refused."""
    before = os.umask(0o002)
    try:
        _, file = written()
    finally:
        os.umask(before)
    Store(cache).check()
    assert not Store(cache).damaged() and not list(Store(cache).entries())
    file.remove()


def test_s5_a_directory_that_others_may_enter_is_closed(cache: Path) -> None:
    _, file = written()
    file.path.parent.chmod(0o777)
    _, again = written(9013)
    assert stat.S_IMODE(again.path.parent.stat().st_mode) == 0o700
    file.remove()
    again.remove()


def test_s5_a_cache_that_cannot_be_written_has_a_second_place(cache: Path, tmp_path: Path) -> None:
    cache.write_text("a file in the place of the directory")
    token, file = written()
    assert file.path.is_relative_to(tmp_path / "temporary") and token_of(9012, None) == token
    file.remove()
    (tmp_path / "temporary" / file.path.parts[-3]).rename(tmp_path / "away")
    (tmp_path / "temporary" / file.path.parts[-3]).write_text("another file")
    with pytest.raises(UsageError, match="has no place that only its user can read"):
        written()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_s5_a_place_of_another_user_is_refused(cache: Path, tmp_path: Path) -> None:
    _, file = written()
    os.chown(file.path.parent, 65534, 65534)
    with pytest.raises(UsageError, match="belongs to another user"):
        token_of(9012, None)
    _, elsewhere = written()
    assert not elsewhere.path.is_relative_to(cache)
    os.chown(file.path.parent, 0, 0)
    os.chown(file.path, 65534, 65534)
    with pytest.raises(UsageError, match="belongs to another user"):
        token_of(9012, None)
    assert not running() or running()[0].port == 9012
    file.remove()
    elsewhere.remove()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_s5_another_user_cannot_read_it() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        (Path(directory) / "open").write_text("for everybody")
        (Path(directory) / "open").chmod(0o644)
        _, file = written(path=Path(directory) / "token")
        child = os.fork()
        if child == 0:
            read = 0
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            for bit, path in ((1, file.path), (2, Path(directory) / "open")):
                with contextlib.suppress(OSError):
                    path.read_bytes()
                    read |= bit
            os._exit(read)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 2, "the other file, and not the token"
        file.remove()


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_s5_a_file_that_others_can_read_is_not_used(mode: int, tmp_path: Path) -> None:
    _, file = written(path=tmp_path / "token")
    file.path.chmod(mode)
    with pytest.raises(UsageError, match="others can read or write"):
        token_of(9012, file.path)
    file.path.chmod(0o400)
    token_of(9012, file.path)
    file.remove()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[" * 4000,
        '{"port": 9012}',
        '{"port": 9012, "token": 5}',
        '{"port": 9012, "token": "short"}',
        '{"port": 9012, "token": "0123456789abcdef0123456789abcdef\\n"}',
        '{"port": 9012, "token": "0123456789abcdef\\r\\nX: injected"}',
        '{"port": 0, "token": "0123456789abcdef0123456789abcdef"}',
        '{"port": 9012, "token": "' + "x" * 20_000 + '"}',
        "\x00" * 100,
    ],
)
def test_s5_a_damaged_file_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(CorruptError):
        token_of(9012, path)


def test_s5_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(UsageError):
            token_of(9012, path)


def test_s5_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    token, file = written(path=tmp_path / "elsewhere")
    _, usual = written()
    usual.path.unlink()
    usual.path.symlink_to(file.path)
    with pytest.raises(CorruptError):
        token_of(9012, None)
    assert token_of(9012, usual.path) == token, "one that the user named may be a link"
    usual.remove()
    assert usual.path.is_symlink(), "what is not ours stays"
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "link").symlink_to(target)
    _, written_over = written(path=tmp_path / "link")
    assert target.read_text() == "kept" and not (tmp_path / "link").is_symlink()
    for each in (file, written_over):
        each.remove()


KILLED = """
import sys, os, signal
from glassengine.executable.cache.store import Store
from glassengine.executable.profile.token import Entry, new_token, write
write(Entry(int(sys.argv[1]), new_token(), os.getpid()), None)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_s5_what_a_killed_process_left_is_swept(cache: Path) -> None:
    done = children.run([sys.executable, "-c", KILLED, "9013", "kill"], timeout=60, check=False)
    assert done.returncode == -9
    (left,) = cache.rglob("9013.json")
    assert not running(), "nobody holds it"
    _, live = written(9014)
    _, file = written(9012)
    assert not left.exists() and [entry.port for entry in running()] == [9012, 9014]
    live.remove()
    file.remove()


def test_s5_the_next_server_of_the_port_takes_its_place() -> None:
    _, first = written()
    token, second = written()
    first.remove()
    assert token_of(9012, None) == token and json.loads(second.path.read_bytes())["pid"] == os.getpid()
    second.remove()
