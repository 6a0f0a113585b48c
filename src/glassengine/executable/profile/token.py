"""The file by which a client shows that it belongs to the user whose program it asks.

    ~/.cache/glassengine/servers/<machine>/9012.json    {"port": 9012, "token": ..., "pid": ..., "directory": ...}

Only its owner can read it (0600, in a directory of 0700), and the server holds it locked while it lives, so that one
left behind by a process that was killed is known for what it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from glassengine import environment
from glassengine.errors import GlassError, UsageError
from glassengine.reading.documents import parsed
from glassengine.reading.files import open_regular, read_open
from glassengine.writing.files import hold, private_directory, write_whole

logger = logging.getLogger("glassengine")

_MOST = 16 << 10
_MAX_LISTED = 200


class Entry(msgspec.Struct):
    """What a client needs, and what a person who lists the servers wants to know."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    token: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{16,256}\Z")]
    pid: int = 0
    directory: str = ""


class TokenFile:
    """The file of one server, from `write` to `remove`.

    Attributes:
        path: Of it.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def remove(self) -> None:
        """Take the file away, unless another server has put its own there since."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                mine, there = os.fstat(self._descriptor), self.path.lstat()
                if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
                    self.path.unlink()
        self.abandon()

    def abandon(self) -> None:
        """Let go of the lock: all that a forked child does."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def new_token() -> str:
    """Return a secret of 256 bits."""
    return secrets.token_urlsafe(32)


def write(entry: Entry, path: Path | None) -> TokenFile:
    """Write the file of a server.

    Args:
        entry: What it says.
        path: Where; None: where clients of the same user look.

    Raises:
        UsageError: It cannot be written, or not so that only its owner reads it.
    """
    if path is not None:
        return _write(entry, path, made=False)
    failed: list[str] = []
    for directory in _directories():
        try:
            found = _write(entry, directory / f"{entry.port}.json", made=True)
        except UsageError as error:
            failed.append(str(error.got))
            continue
        _sweep(directory)
        return found
    raise UsageError(
        "the token of the profile server has no place that only its user can read",
        got="; ".join(failed),
        hint="glass.profiler.start_server(..., token_file=FILE)",
    )


def token_of(port: int, path: str | Path | None) -> str:
    """Return the token of the server that listens on a port.

    Args:
        port: On loopback.
        path: The file that holds it; None: where servers of the same user write it.

    Raises:
        UsageError: There is none, or others could have read or written it.
        CorruptError: The file is damaged.
    """
    if path is not None:
        return _read(Path(path)).token
    for directory in _directories():
        file = directory / f"{port}.json"
        if os.path.lexists(file):
            return _read(file, private=directory).token
    raise UsageError(
        f"no program of this user has a profile server on port {port} of this machine",
        expected=[f"localhost:{entry.port} (process {entry.pid})" for entry in running()] or None,
        hint=f"glass.profiler.start_server({port}) in the program, or --token-file FILE of another user's",
    )


def running() -> list[Entry]:
    """Return the servers of this user that live on this machine, by port."""
    found: dict[int, Entry] = {}
    for directory in _directories():
        for path in _files(directory):
            with contextlib.suppress(GlassError, OSError):
                entry = _read(path, private=directory)
                if _lives(path, entry):
                    found.setdefault(entry.port, entry)
    return [found[port] for port in sorted(found)]


def _directories() -> list[Path]:
    """Return where the files are looked for: in the user's cache, or beside everybody's, if that cannot be written."""
    machine = re.sub(r"[^A-Za-z0-9._-]", "_", platform.node()) or "localhost"
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    return [
        environment.cache_dirs()["glassengine"] / "servers" / machine.lstrip("."),
        Path(tempfile.gettempdir(), f"glassengine-{user}", "servers"),
    ]


def _write(entry: Entry, path: Path, *, made: bool) -> TokenFile:
    """Write a file beside its place, and move it there whole.

    Args:
        entry: What it says.
        path: Its place.
        made: Whether its directory is ours, to be made private.
    """
    temporary = path.parent / f".{os.getpid()}-{secrets.token_hex(4)}.partial"
    descriptor = None
    try:
        private_directory(path.parent)
        if made:
            _make_private(path.parent)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        hold(descriptor)
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o600)  # independent of the umask
        write_whole(descriptor, msgspec.json.encode(entry) + b"\n")
        temporary.replace(path)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)
        raise UsageError(
            "the token of the profile server cannot be written", got=f"{path}: {error.strerror or error}"
        ) from error
    return TokenFile(path, descriptor)


def _make_private(directory: Path) -> None:
    """Refuse a directory that is someone else's, and close one of ours to others.

    Raises:
        OSError: It is not a directory, or someone else's.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(0, "it is not a directory", str(directory))
    if not _is_ours(found):
        raise PermissionError(0, "it belongs to another user", str(directory))
    if stat.S_IMODE(found.st_mode) != 0o700:
        directory.chmod(0o700)


def _is_ours(found: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or found.st_uid == os.geteuid()


def _read(path: Path, *, private: Path | None = None) -> Entry:
    if private is not None:
        found = private.lstat()
        if not stat.S_ISDIR(found.st_mode) or not _is_ours(found):
            raise UsageError("the directory of a token belongs to another user", got=str(private))
    with open_regular(path, inside=private) as file:
        found = os.fstat(file.fileno())
        if hasattr(os, "geteuid") and found.st_mode & 0o077:
            raise UsageError(
                "others can read or write the token",
                got=f"{path}: mode {stat.S_IMODE(found.st_mode):o}",
                expected="600",
                hint=f"chmod 600 {path}",
            )
        if private is not None and not _is_ours(found):
            raise UsageError("a token belongs to another user", got=str(path))
        return parsed(read_open(file, path, most=_MOST), Entry, path, what="the token of a profile server")


def _files(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for number, entry in enumerate(entries):
            if number >= _MAX_LISTED:
                return
            if re.fullmatch(r"\d{1,5}\.json", entry.name):
                yield directory / entry.name


def _lives(path: Path, entry: Entry) -> bool:
    """Say whether the server that wrote a file may live: it holds the file locked, if its file system has locks."""
    with open_regular(path, inside=path.parent) as file:
        try:
            hold(file.fileno())
        except BlockingIOError:
            return True
    try:
        if entry.pid > 0:
            os.kill(entry.pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return entry.pid > 0


def _sweep(directory: Path) -> None:
    """Take away what processes that were killed left behind."""
    for path in list(_files(directory)):
        with contextlib.suppress(GlassError, OSError):
            if not _lives(path, _read(path, private=directory)):
                path.unlink()
                logger.debug("the profile server of %s is gone", path.stem)
