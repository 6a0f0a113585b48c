"""Memory that a ring lies in: of this process alone, or that of a file, which outlives the process.

What is written into memory of a file is the kernel's at once: a process that is killed loses nothing of it. A machine
that loses its power does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from glassengine.errors import GlassError

_LIBC = ctypes.CDLL(None, use_errno=True)
_MMAP, _MUNMAP, _MADVISE = _LIBC.mmap, _LIBC.munmap, _LIBC.madvise
_MMAP.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong)
_MMAP.restype = ctypes.c_void_p
_MUNMAP.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FIXED = 0x10  # MAP_FIXED of Linux and macOS
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux: map pages now, keep what is in them


class Memory:
    """A block of memory that stays at its address for as long as this lives.

    Args:
        num_bytes: Its size; a multiple of a page.
        file: Descriptor of a file at least as large, whose bytes it is; None for memory of this process alone. May be
            closed afterwards.

    Attributes:
        address: Where it begins.
        view: Its bytes.

    Raises:
        GlassError: There is not so much memory.
        OSError: The file cannot be mapped.
    """

    def __init__(self, num_bytes: int, file: int | None = None) -> None:
        flags, descriptor = (_OWN, -1) if file is None else (mmap.MAP_SHARED, file)
        address = _MMAP(None, num_bytes, _ACCESS, flags, descriptor, 0)
        if address == _FAILED or address is None:
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
        weakref.finalize(buffer, _MUNMAP, address, num_bytes).atexit = False
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
            _MMAP(self.address, self._num_bytes, _ACCESS, _OWN | _FIXED, -1, 0)
            self._is_shared = False

    def give_back(self) -> None:
        """Give memory back to the system now: references to it may be collected much later."""
        self.leave_file()
        if hasattr(mmap, "MADV_DONTNEED"):
            _MADVISE(self.address, self._num_bytes, mmap.MADV_DONTNEED)
