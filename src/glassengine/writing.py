"""Files that appear whole or not at all, with checksums, and those of an earlier run put away before."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import json
import os
import re
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from glassengine.environment import open_flag
from glassengine.errors import UsageError
from glassengine.stores.places import RemotePath, place

if TYPE_CHECKING:
    import torch

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:  # where it was not installed along; the values are the same
    from zlib import crc32 as crc32

try:
    from zlib_ng.zlib_ng import crc32_combine
except ImportError:  # nor do old versions have it

    def crc32_combine(one: int, other: int, num_bytes: int, /) -> int:
        """Return the CRC-32 of `one`'s bytes and then `num_bytes` bytes, whose CRC-32 is `other`."""
        return crc32(bytes(num_bytes), one) ^ crc32(bytes(num_bytes)) ^ other


with contextlib.suppress(ImportError):  # Windows has none
    import fcntl


_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux

ASIDE = re.compile(r"\.\d+\.partial")
"""Names that `aside` gives; a process that is killed leaves one behind."""


@contextlib.contextmanager
def aside(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` that takes its place when the block ends well, and vanishes otherwise."""
    path = target.parent / f".{os.getpid()}{threading.get_ident()}.partial"
    try:
        yield path
        path.replace(target)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def exchange(one: Path, other: Path) -> bool:
    """Let two files or directories change places in one step; returns False where the system cannot.

    Raises:
        OSError: They cannot, for want of room, say; then both are where they were.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux, with a C library of 2018 or later
    if rename is None:
        return False
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    while rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):  # an older kernel, or a file system
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), str(one), None, str(other))
    return True


def remove_tree(directory: str | Path) -> None:
    """Remove a directory and what is in it, as far as the disk lets it; never raises OSError.

    `shutil.rmtree` raises what the closing of a directory does even where it is to ignore errors, and stops there.
    """
    for _ in range(2):
        with contextlib.suppress(OSError):
            shutil.rmtree(directory, ignore_errors=True)


class _Deferring(io.RawIOBase):
    """A file that remembers the first error of writing and accepts everything after it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        left = view
        try:
            while left and self.error is None:
                left = left[self._file.write(left) :]
        except OSError as error:
            self.error = error
        return view.nbytes


@contextlib.contextmanager
def open_for_torch(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file for `torch.save` and what else writes archives of torch.

    torch ends the process where a write of its own fails while it closes an archive: here it does not see the error.

    Raises:
        OSError: It cannot be written, for want of room, say; when the block ends.
    """
    with path.open("wb", buffering=0) as file:
        deferring = _Deferring(cast("BinaryIO", file))
        yield cast("BinaryIO", deferring)
        if deferring.error is not None:
            raise OSError(deferring.error.errno, deferring.error.strerror, str(path)) from deferring.error


_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def save_safetensors(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file.

    Raises:
        OSError: It cannot be written, for want of room, say.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        number = _SYSTEM_ERROR.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def write_events(directory: Path, values: Iterable[tuple[int, Mapping[str, Any]]], end: str) -> Path:
    """Write an event file of TensorBoard into a directory, and return it.

    Args:
        directory: Is made where it is missing.
        values: Of each value the step, and the fields of `Summary.Value`.
        end: Of the name of the file.

    Raises:
        ImportError: TensorBoard, an extra, is not installed.
        OSError: It cannot be written.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    # Not by its SummaryWriter, a thread of which writes: what goes wrong there is a traceback of that thread.
    directory.mkdir(parents=True, exist_ok=True)
    written, now = io.BytesIO(), time.time()
    records = RecordWriter(written)
    records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
    for step, value in values:
        summary = Summary(value=[Summary.Value(**value)])
        records.write(Event(wall_time=now, step=step, summary=summary).SerializeToString())
    target = directory / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.{end}"
    with aside(target) as path:
        path.write_bytes(written.getvalue())
    return target


def hold(file: int) -> None:
    """Lock an open file or directory until it is closed or the process ends; nothing where there are no locks.

    Raises:
        BlockingIOError: Someone else holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems have none
        return


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Lock a directory while the block runs. No file is left in it.

    Raises:
        BlockingIOError: Someone else holds it.
    """
    lock = os.open(directory, os.O_RDONLY)
    try:
        hold(lock)
        yield
    finally:
        os.close(lock)


def next_directory(parent: Path, prefix: str, *, digits: int, first: int = 1) -> Path:
    """Make the directory `<prefix>-<number>` in `parent` that follows those there; every caller gets its own.

    Raises:
        OSError: It cannot be made.
    """
    name = re.compile(rf"{re.escape(prefix)}-(\d+)")
    number = max(
        (int(found[1]) for path in parent.iterdir() if (found := name.fullmatch(path.name))), default=first - 1
    )
    while True:
        number += 1
        target = parent / f"{prefix}-{number:0{digits}d}"
        # Another process may have made it since.
        with contextlib.suppress(FileExistsError):
            target.mkdir()
            return target


def put_away(directory: Path, items: Iterable[Path], *, first: int = 1) -> Path:
    """Move `items` of `directory`, in their order, into a new directory `earlier-NNN` in it, and return that.

    Args:
        directory: What they are in.
        items: Files and directories; a move that is interrupted leaves the rest where they are.
        first: As in `next_directory`.

    Raises:
        OSError: Something cannot be moved.
    """
    target = next_directory(directory, "earlier", digits=3, first=first)
    for path in items:
        path.rename(target / path.name)
    return target


def open_to_append(path: Path) -> int:
    """Return the descriptor of a plain file, made if need be, to whose end is written.

    Raises:
        OSError: It cannot be opened; or it is a link, a pipe, or a file that other directories have as well.
    """
    flags = (
        os.O_WRONLY
        | os.O_APPEND
        | os.O_CREAT
        | open_flag("O_CLOEXEC")
        | open_flag("O_NOFOLLOW")
        | open_flag("O_NONBLOCK")
    )
    descriptor = os.open(path, flags, 0o666)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a plain file of this directory alone", str(path))


def write_whole(descriptor: int, data: bytes) -> None:
    """Write all bytes, which the system may take in pieces.

    Raises:
        OSError: They cannot be written.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def append(path: Path, data: bytes) -> None:
    """Write to the end of a plain file; raises as `open_to_append`."""
    descriptor = open_to_append(path)
    try:
        write_whole(descriptor, data)
    finally:
        os.close(descriptor)


def untrusted(status: os.stat_result) -> str | None:
    """Return why others could have changed a file or directory with this status; None if they could not."""
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"user {status.st_uid} owns it"
    if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def private_directory(directory: Path) -> None:
    """Make a directory and what is missing above it so that only the user may enter, with any umask.

    Raises:
        OSError: It cannot be made.
    """
    for path in [*reversed(directory.parents), directory]:
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


def local(path: str | Path) -> Path:
    """Return the path of what is to be written here.

    Raises:
        UsageError: It is in a store, as `s3://bucket/run`, or nowhere. A directory that is called so is `./s3:/...`,
            as a string.
    """
    found = place(path)
    if not isinstance(found, RemotePath):
        return found
    raise UsageError(
        "only files of this machine are written",
        got=str(found),
        expected="a path",
        hint="write to a directory here, and copy or mount it",
    )


_MAX_BUFFERS = 1000  # of one call of writev; the limit of Linux is 1024


def write_all(file: io.FileIO | int, buffers: Sequence[bytes | memoryview]) -> None:
    """Write all of `buffers`: a raw write may be short near a full disk, and always above 2 GiB."""
    descriptor = file if isinstance(file, int) else file.fileno()
    views = [memoryview(data) for data in buffers if len(data)]
    position = 0
    while position < len(views):
        batch = views[position : position + _MAX_BUFFERS]
        written = os.writev(descriptor, batch)
        for view in batch:
            if written < view.nbytes:
                views[position] = view[written:]
                break
            written -= view.nbytes
            position += 1


# Up to here neither library lets go of the interpreter lock.
_LOCKED_BYTES = 5 << 10


def crc32_of_small(data: memoryview, value: int = 0) -> int:
    """Return the CRC-32 of bytes, some hundred kilobytes at most, without letting go of the interpreter lock.

    Other threads that run Python wait a few microseconds; handing the lock over to it and back takes ten times as long.
    `value` is that of the bytes before.
    """
    for start in range(0, len(data), _LOCKED_BYTES):
        value = crc32(data[start : start + _LOCKED_BYTES], value)
    return value


def crc32_joined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of bytes, of whose consecutive parts the CRC-32 and the number of bytes are given."""
    joined = 0
    for checksum, num_bytes in parts:
        joined = crc32_combine(joined, checksum, num_bytes)
    return joined


def document_checksum(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON document, as it is after reading; its layout and the order of keys do not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
