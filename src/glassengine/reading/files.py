"""Opens plain files only, never leaves a directory that a format owns, and takes no more memory than its limit.

Also keys of this user, and text of others with escapes in place of what a terminal obeys.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from glassengine import environment
from glassengine.errors import CorruptError, GlassError, UsageError, logger
from glassengine.stores.places import RemotePath, remote

_READ = os.O_RDONLY | environment.open_flag("O_CLOEXEC") | environment.open_flag("O_BINARY")
# A pipe without a writer would block the opening for ever; for a plain file the flag means nothing.
_NONBLOCK = environment.open_flag("O_NONBLOCK")
_NOFOLLOW = environment.open_flag("O_NOFOLLOW")
_DIRECTORY = environment.open_flag("O_PATH") | environment.open_flag("O_DIRECTORY") | environment.open_flag("O_CLOEXEC")

# What a shell writes for `<(command)`, and names for what is already open: the user wrote the other end.
_OPEN_ALREADY = re.compile(r"/dev/(stdin|fd/\d+)|/proc/self/fd/\d+")

_LONGEST_SHOWN = 1000

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | Path, *, inside: str | Path | None = None) -> io.BufferedReader:
    """Open a plain file, or an object of a store, for reading; a pipe, a device, a directory are refused at once.

    Args:
        path: The file. Without `inside` the user named it, and it may be a link.
        inside: The directory that a format owns: `path` must lie below it, and no part of the way from there is a link.

    Raises:
        UsageError: Without `inside`: there is no such file, or it cannot be read.
        CorruptError: With `inside`: the same, or the way leads out of the directory.
    """
    there = remote(path)
    if there is not None:
        return _open_remote(there, inside)
    place = Path(path)
    try:
        if inside is None:
            # Opening a device can have effects of its own, so that its kind is looked up first.
            _regular(os.stat(place).st_mode, place, owned=False)  # noqa: PTH116
            descriptor = os.open(place, _READ | _NONBLOCK)
        else:
            descriptor = _open_inside(place, Path(inside))
    except OSError as error:
        kind = UsageError if inside is None else CorruptError
        raise kind("a file cannot be read", got=f"{shown(place)}: {_reason(error)}") from error
    except ValueError as error:  # a NUL in a name
        raise CorruptError("a file cannot be read", got=f"{shown(place)}: {error}") from error
    try:
        _regular(os.fstat(descriptor).st_mode, place, owned=inside is not None)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def is_regular(path: str | Path, *, inside: str | Path | None = None) -> bool:
    """Say whether `open_regular` would open this file."""
    try:
        with open_regular(path, inside=inside):
            return True
    except GlassError:
        return False


def require_directory(path: Path) -> None:
    """Refuse anything but a directory where a format has one: a link leads out of it.

    Raises:
        CorruptError: It is none, or not there.
    """
    if isinstance(path, RemotePath):
        if not path.is_dir():
            raise CorruptError("not a directory", got=shown(path))
        return
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError) as error:
        raise CorruptError("a directory cannot be read", got=f"{shown(path)}: {error}") from error
    if not stat.S_ISDIR(mode):
        found = next((name for test, name in _KINDS if test(mode)), "a file")
        raise CorruptError("not a directory", got=f"{shown(path)}: {found}")


def read_bytes(path: str | Path, *, most: int, inside: str | Path | None = None) -> bytes:
    """Return what is in a plain file.

    Args:
        path: The file. Without `inside` also what the user's shell has opened for us (`/dev/stdin`, `<(command)`).
        most: Bytes that are read at most; a larger file is refused before memory is taken.
        inside: As for `open_regular`.

    Raises:
        UsageError: As for `open_regular`.
        CorruptError: As for `open_regular`, or the file is too large.
    """
    if inside is None and _OPEN_ALREADY.fullmatch(str(path)):
        return _read_stream(Path(path), most)
    with open_regular(path, inside=inside) as file:
        return read_open(file, path, most=most)


def read_open(file: BinaryIO, path: str | Path, *, most: int) -> bytes:
    """Return the rest of an open file.

    Raises:
        CorruptError: It holds more, or cannot be read.
    """
    try:
        size = _size(file) - file.tell()
        # A file can grow while it is read, and those of the kernel say that they are empty.
        data = file.read(most + 1) if size <= most else b""
    except OSError as error:
        raise CorruptError("a file cannot be read", got=f"{shown(path)}: {_reason(error)}") from error
    if max(size, len(data)) > most:
        raise too_large(path, max(size, len(data)), most)
    return data


def read_at(descriptor: int, num_bytes: int, position: int) -> bytes:
    """Return bytes of an open file; fewer only where it ends: the system may give them in pieces.

    Raises:
        OSError: They cannot be read.
    """
    if not hasattr(os, "pread"):  # Windows
        os.lseek(descriptor, position, os.SEEK_SET)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(num_bytes)
    pieces = [os.pread(descriptor, num_bytes, position)]
    while (done := sum(map(len, pieces))) < num_bytes and pieces[-1]:
        pieces.append(os.pread(descriptor, num_bytes - done, position + done))
    return b"".join(pieces)


def read_text(
    path: str | Path, *, most: int, inside: str | Path | None = None, encoding: str = "utf-8", errors: str = "strict"
) -> str:
    """Return the text of a plain file; as `read_bytes`, line ends as Python reads them.

    Raises:
        UsageError: As for `read_bytes`.
        CorruptError: As for `read_bytes`, or it is not text of this encoding.
    """
    data = read_bytes(path, most=most, inside=inside)
    try:
        text = data.decode(encoding, errors)
    except UnicodeDecodeError as error:
        raise CorruptError("not a text file", got=f"{shown(path)}: {error}", expected=f"text in {encoding}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def too_large(path: str | Path, size: int, most: int) -> CorruptError:
    """Return the error for a file of `size` bytes that may have `most`."""
    return CorruptError("a file is too large", got=f"{shown(path)}: {size:,} bytes", expected=f"at most {most:,} bytes")


def shown(path: str | Path) -> str:
    """Return a path as it can be printed: without undecodable bytes, line ends and great length."""
    text = str(path)
    if len(text) > _LONGEST_SHOWN:  # first: escapes of hundreds of megabytes take minutes, and many times the memory
        text = f"{text[:500]}...{text[-400:]}"
    text = printable(text.encode("utf-8", "backslashreplace").decode())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:500]}...{text[-400:]}"


def _open_inside(path: Path, directory: Path) -> int:
    """Open `path` below `directory`, step by step, so that no link can be put in the way."""
    try:
        parts = path.relative_to(directory).parts
    except ValueError:
        parts = ()
    if not parts or ".." in parts:
        raise CorruptError("a file is outside of its directory", got=shown(path), expected=f"below {shown(directory)}")
    here = os.open(directory, _DIRECTORY)
    try:
        for name in parts[:-1]:
            there = os.open(name, _DIRECTORY | _NOFOLLOW, dir_fd=here)
            os.close(here)
            here = there
        # Its kind first: opening a device can have effects of its own.
        _regular(os.stat(parts[-1], dir_fd=here, follow_symlinks=False).st_mode, path, owned=True)
        return os.open(parts[-1], _READ | _NONBLOCK | _NOFOLLOW, dir_fd=here)
    finally:
        os.close(here)


def _open_remote(there: RemotePath, inside: str | Path | None) -> io.BufferedReader:
    if inside is not None and (".." in there.parts or not there.is_relative_to(str(inside))):
        raise CorruptError("a file is outside of its directory", got=shown(there), expected=f"below {shown(inside)}")
    from glassengine.stores.objects import open_object

    return open_object(str(there), owned=inside is not None)


def _size(file: BinaryIO) -> int:
    size: int | None = getattr(getattr(file, "raw", None), "size", None)  # of an object
    return os.fstat(file.fileno()).st_size if size is None else size


def _regular(mode: int, path: Path, *, owned: bool) -> None:
    if not stat.S_ISREG(mode):
        found = next((name for test, name in _KINDS if test(mode)), "something else")
        kind = CorruptError if owned else UsageError
        raise kind("not a plain file", got=f"{shown(path)}: {found}")


def _reason(error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR):
        return f"{error.strerror} (a link instead of a file or directory)"
    return error.strerror or str(error)


def _read_stream(path: Path, most: int) -> bytes:
    """Read what need not be a file, up to its end or `most`, in pieces: no more memory is taken than it has."""
    pieces: list[bytes] = []
    size = 0
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            raise UsageError("not a plain file", got=f"{shown(path)}: a directory")
        with path.open("rb", buffering=0) as file:
            while size <= most and (piece := file.read(min(1 << 20, most + 1 - size))):
                pieces.append(piece)
                size += len(piece)
    except OSError as error:
        raise UsageError("a file cannot be read", got=f"{shown(path)}: {_reason(error)}") from error
    if size > most:
        raise too_large(path, size, most)
    return b"".join(pieces)


@functools.lru_cache(maxsize=8)
def _unusual(also: str) -> re.Pattern[str]:
    """All others are printed as they are; most text has none, and a hundred thousand lines are looked at."""
    return re.compile(rf"[^\x20-\x7e{re.escape(also)}]")


def printable(text: str, also: str = "") -> str:
    """Return `text` with escapes in place of what would move the cursor, turn the direction or break the line."""
    if text.isprintable():
        return text

    def escaped(found: re.Match[str]) -> str:
        char = found[0]
        return char if char.isprintable() else ascii(char)[1:-1]

    return _unusual(also).sub(escaped, text)


_KEY_BYTES = 32


def user_key(name: str, *, make: bool = False) -> bytes | None:
    """Return a key of 32 bytes; None if there is none, or if others could know or have written it.

    Raises:
        OSError: The key cannot be made or read.
    """
    path = environment.config_dir() / name
    if not os.path.lexists(path):
        if not make:
            return None
        _make(path)
    try:
        with open_regular(path, inside=path.parent) as file:
            status = os.fstat(file.fileno())
            data = read_open(file, path, most=_KEY_BYTES)
    except GlassError as error:
        logger.warning("the key %s is not used: %s", name, error.got)
        return None
    is_own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    if len(data) != _KEY_BYTES or not is_own or (os.name == "posix" and status.st_mode & 0o077):
        logger.warning("the key %s is not used: it must be yours alone (chmod 600), of 32 bytes: %s", name, path)
        return None
    return data


def _make(path: Path) -> None:
    """Make a key; of two processes that do so at once the second one uses the key of the first."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)
