"""The file that a ring lies in, so that steps that have ended survive the end of the process.

Its first page says whose it is and where the ring's records are; the ring follows. Positions only grow, as in the ring.
The bytes of a position that is not below `tail` are in the ring still. What is written into mapped memory of a file is
the kernel's at once: a process that is killed loses nothing of it. Nothing guards the bytes of tensors against a
machine that stops: the pages of a file reach the disk in any order. So a ring is used only while the machine that wrote
it runs, which its boot id says; and only when its process has ended, which its number and start time say.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import stat
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from glassengine.errors import GlassError
from glassengine.reading.files import read_at
from glassengine.recording.layout import layout
from glassengine.recording.layout.shard_files import MAP_FAILED, MMAP, MUNMAP
from glassengine.writing import crc32

_LIBC = ctypes.CDLL(None, use_errno=True)
_MADVISE = _LIBC.madvise
_MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FIXED = 0x10  # MAP_FIXED of Linux and macOS
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux: map pages now, keep what is in them


class RingMemory:
    """A block of memory that stays at its address for as long as this lives.

    Args:
        num_bytes: Its size; a multiple of a page.
        file: Descriptor of a file at least as large, whose bytes it is; None for memory of this process alone. May be
            closed afterwards.
    """

    def __init__(self, num_bytes: int, file: int | None = None) -> None:
        flags, descriptor = (_OWN, -1) if file is None else (mmap.MAP_SHARED, file)
        address = MMAP(None, num_bytes, _ACCESS, flags, descriptor, 0)
        if address == MAP_FAILED or address is None:
            number = ctypes.get_errno()
            if file is not None:
                raise OSError(number, os.strerror(number))
            raise GlassError(
                "no memory to record into",
                got=f"{os.strerror(number)}: {num_bytes >> 20} MiB",
                hint="allow the process more (ulimit -v)",
            )
        self.address: int = address
        self._num_bytes = num_bytes
        self._is_shared = file is not None
        buffer = (ctypes.c_ubyte * num_bytes).from_address(address)
        # Not at the end of the process: a thread may still use it then.
        weakref.finalize(buffer, MUNMAP, address, num_bytes).atexit = False
        if file is None and hasattr(mmap, "MADV_HUGEPAGE"):
            # Large pages are mapped many at a time (of a file the kernel makes none); one without them refuses.
            _MADVISE(address, num_bytes, mmap.MADV_HUGEPAGE)
        self.view = memoryview(buffer).cast("B")

    def populate(self, start: int, num_bytes: int) -> bool:
        """Map pages now; returns whether the system knows how to."""
        return not _MADVISE(self.address + start, num_bytes, _POPULATE_WRITE)

    def leave_file(self) -> None:
        """Replace the memory of the file by memory of this process alone, without the bytes."""
        if self._is_shared:
            MMAP(self.address, self._num_bytes, _ACCESS, _OWN | _FIXED, -1, 0)
            self._is_shared = False

    def give_back(self) -> None:
        """Give memory back to the system now: references to it may be collected much later."""
        self.leave_file()
        if hasattr(mmap, "MADV_DONTNEED"):
            _MADVISE(self.address, self._num_bytes, mmap.MADV_DONTNEED)


_MAGIC = b"GLASSRNG"
_VERSION = 1
# Magic, version, size of the ring and of its journal, process, its start, name space of its number, machine; then the
# CRC-32 of these.
_OWNER = struct.Struct("<8sIxxxxQQQQQ36sxxxx")
_CHECKSUM = struct.Struct("<I")
# Far apart: two threads write them.
_TAILS_AT, _LAST_AT, _STOPPED_AT = (256, 320), 512, 768
_STOPPED, _LEFT = 1, 2
FIRST = mmap.ALLOCATIONGRANULARITY
_MAX_BYTES = 1 << 32
# A recording needs the disk more than its ring does.
_MOST_OF_ROOM = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """The process that writes a ring."""

    process: int
    start: int
    namespace: int
    machine: bytes

    @classmethod
    def this(cls) -> Owner | None:
        """Return this process; None on a system that does not tell."""
        try:
            machine = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
            process = os.getpid()
            owner = cls(process, _start_of(process), Path("/proc/self/ns/pid").stat().st_ino, machine)
        except (OSError, ValueError, IndexError):
            return None
        return owner if len(machine) == 36 else None

    def has_ended(self) -> bool | None:
        """Return whether the process has ended, as far as it can be seen from here; None if that cannot be seen."""
        here = Owner.this()
        if here is None or here.machine != self.machine or here.namespace != self.namespace:
            return None
        try:
            return _start_of(self.process) != self.start
        except (OSError, ValueError, IndexError):
            return True

    def is_of_this_machine(self) -> bool:
        """Return whether the machine has not been started again since, and is this one."""
        here = Owner.this()
        return here is not None and here.machine == self.machine


def _start_of(process: int) -> int:
    """Return when a process began; that of one that has ended and is only to be waited for is another one."""
    # The name, in parentheses, may have spaces.
    fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def _take_room(descriptor: int, num_bytes: int) -> None:
    """Have the file system keep room for a file: a page that it has none for ends the process that writes there."""
    fallocate = _LIBC.fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    while fallocate(descriptor, 0, 0, num_bytes):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


class RingFile:
    """A ring's file that is being written; removed when the recording is closed."""

    def __init__(self, directory: Path, num_bytes: tuple[int, int]) -> None:
        owner = Owner.this()
        if owner is None:
            raise OSError(errno.ENOSYS, "this system has no start times of processes")
        self.first = (FIRST, FIRST + num_bytes[0])
        size = FIRST + sum(num_bytes)
        self._path = directory / layout.RING
        room = os.statvfs(directory)
        if size > room.f_bavail * room.f_frsize // _MOST_OF_ROOM:
            raise OSError(errno.ENOSPC, "the disk has little room left")
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _take_room(descriptor, size)
            self.memory = RingMemory(size, descriptor)
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        finally:
            with contextlib.suppress(OSError):  # of what is mapped nothing is lost
                os.close(descriptor)
        fields = (*num_bytes, owner.process, owner.start, owner.namespace, owner.machine)
        head = _OWNER.pack(_MAGIC, _VERSION, *fields)
        self._last, self._stopped, *self._tails = (
            ctypes.c_uint64.from_address(self.memory.address + place) for place in (_LAST_AT, _STOPPED_AT, *_TAILS_AT)
        )
        head += _CHECKSUM.pack(crc32(head))
        self.memory.view[: len(head)] = head

    def set_tail(self, part: int, position: int) -> None:
        """Note that everything below a position is on file, or is not wanted any more."""
        self._tails[part].value = position

    @property
    def last(self) -> int:
        """One more than the position of the last record; 0 where there is none."""
        return self._last.value

    @last.setter
    def last(self, value: int) -> None:
        self._last.value = value

    def stop(self) -> None:
        """Note that what is in the ring is not to be recovered."""
        self._stopped.value = _STOPPED

    def leave(self) -> None:
        """Note that writing has ended, and that the content of the ring may be recovered."""
        self._stopped.value = _LEFT

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def ring_file(directory: Path, num_bytes: tuple[int, int]) -> RingFile | None:
    """Return a new file for a ring in a directory; None where it cannot be made, which is logged."""
    try:
        return RingFile(directory, num_bytes)
    except OSError as error:
        _log.log(
            logging.INFO if error.errno == errno.ENOSYS else logging.WARNING,
            "a killed process loses the last steps of %s, at most %d MiB: no file for the ring: %s",
            directory,
            num_bytes[0] >> 20,
            error.strerror,
        )
        return None


@dataclass(frozen=True)
class LeftRing:
    """A ring that was found on disk.

    Attributes:
        owner: Who wrote it.
        num_bytes: Its size, and that of its journal.
        tails: Of each: below it, bytes are not there any more.
        last: One more than the position of the last record; 0 where there is none.
        is_stopped: Whether its writer gave it up.
        is_left: Whether its writer ended and left the steps in it that it could not write.
    """

    file: BinaryIO
    owner: Owner
    num_bytes: tuple[int, int]
    tails: tuple[int, int]
    last: int
    is_stopped: bool
    is_left: bool

    @classmethod
    def read(cls, file: BinaryIO) -> LeftRing | None:
        """Return the ring in a file; None where there is none that is whole."""
        descriptor = file.fileno()
        page = read_at(descriptor, FIRST, 0)
        if len(page) < FIRST:
            return None
        head = page[: _OWNER.size]
        magic, version, size, journal, process, start, namespace, machine = _OWNER.unpack(head)
        if (
            magic != _MAGIC
            or version != _VERSION
            or page[_OWNER.size :][: _CHECKSUM.size] != _CHECKSUM.pack(crc32(head))
        ):
            return None
        found = os.fstat(descriptor)
        is_possible = 0 < size <= _MAX_BYTES and 0 < journal <= _MAX_BYTES
        if not is_possible or not stat.S_ISREG(found.st_mode) or found.st_size != FIRST + size + journal:
            return None
        last, stopped, *tails = (
            struct.unpack_from("<Q", page, place)[0] for place in (_LAST_AT, _STOPPED_AT, *_TAILS_AT)
        )
        owner = Owner(process, start, namespace, machine)
        is_left = stopped == _LEFT
        return cls(file, owner, (size, journal), (tails[0], tails[1]), last, bool(stopped) and not is_left, is_left)

    def bytes_at(self, position: int, num_bytes: int, part: int = 0) -> bytes:
        """Return the bytes of a slot, of the ring or of its journal."""
        size = self.num_bytes[part]
        start = position % size
        if position < self.tails[part] or not 0 <= num_bytes <= size - start:
            raise ValueError("a slot that is not in the ring")
        data = read_at(self.file.fileno(), num_bytes, FIRST + part * self.num_bytes[0] + start)
        if len(data) < num_bytes:
            raise ValueError("the ring is cut")
        return data
