"""The memory between a running model and the thread that writes: fixed in size, used in turn, waited for when full.

Copies from an accelerator go into pinned memory, on the stream that the model runs on. Later operations of that stream
run after the copy, so a later change of the tensor does not reach it. Only the thread that writes waits for the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from glassengine import blocks
from glassengine.errors import UsageError
from glassengine.recording.layout.layout import aligned
from glassengine.recording.layout.tensors import has_no_memory
from glassengine.recording.ring.file import RingFile, RingMemory


class Flag:
    """Like `threading.Event`, for one thread that waits, and proof against signals.

    An event has a lock that is taken in Python code: an exception that a signal handler raises right then (Ctrl-C, a
    time limit) leaves it locked, and the next to set the event waits for ever. Here every method is one call of
    a lock.
    """

    def __init__(self) -> None:
        self._lowered = threading.Lock()
        self._lowered.acquire()

    def set(self) -> None:
        """Raise the flag, if it is not raised."""
        with contextlib.suppress(RuntimeError):  # it is raised
            self._lowered.release()

    def clear(self) -> None:
        """Lower the flag, if it is raised."""
        self._lowered.acquire(blocking=False)

    def wait(self, timeout: float = -1) -> bool:
        """Wait until the flag is raised, at most `timeout` seconds, and lower it; return whether it was."""
        return self._lowered.acquire(timeout=timeout)


# Unlike ctypes.memmove these keep the interpreter lock: handing it over costs more than a small copy.
_LIBC = ctypes.PyDLL(None)
MEMMOVE, MEMCMP = _LIBC.memmove, _LIBC.memcmp
MEMMOVE.argtypes = MEMCMP.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
MEMMOVE.restype = None
_SMALL_COPY = 1 << 18

_POPULATE_STEP = 4 << 20
WARM_BYTES = 64 << 20


class Ring:
    """Slots of one block of memory, reserved by producers under one lock, released in the same order by a consumer.

    Positions only grow; a slot lies at its position modulo the size and never wraps around the end. Whenever the ring
    is empty it starts over at its beginning, so that a recording of small steps touches little of it.

    Args:
        num_bytes: Its size.
        file: Where its bytes outlive the process; None for memory of this process alone.
        part: Of the file; see `RingFile`.
    """

    def __init__(self, num_bytes: int, file: RingFile | None = None, part: int = 0) -> None:
        self.num_bytes = num_bytes
        self.file = file
        self._memory = RingMemory(num_bytes) if file is None else file.memory
        self._part = part
        self._first = first = 0 if file is None else file.first[part]
        self._tensor = torch.frombuffer(self._memory.view, dtype=torch.uint8)[first : first + num_bytes]
        self._address = self._memory.address + first
        self.view = self._memory.view[first : first + num_bytes]
        self._head = 0
        self._tail = 0
        self._skipped = self._skipped_to = 0
        self._populated = 0
        self._has_room = Flag()

    def reserve(self, num_bytes: int, on_wait: Callable[[], None]) -> int:
        """Return the position of a new slot of at most `num_bytes` of the ring's size.

        Args:
            num_bytes: Size of the slot; at most the ring's.
            on_wait: Called repeatedly while the ring is full; may raise.
        """
        rounded = aligned(num_bytes)
        start, tail = self._head, self._tail
        is_mapped = start % self.num_bytes + rounded <= self._populated
        if start != tail and is_mapped and start + rounded - tail <= self.num_bytes:
            # The short way: right behind the last slot.
            self._head = start + rounded
            return start
        while True:
            head = self._head
            if head == self._tail:
                head += -head % self.num_bytes
                self._tail = head
            start = head
            offset = start % self.num_bytes
            if offset + rounded > self._populated:
                # Back to the beginning, where pages are mapped, if that is free; at the end always.
                again = start - offset + self.num_bytes
                if offset + rounded > self.num_bytes or again + rounded - self._tail <= self.num_bytes:
                    start = again
            if start + rounded - self._tail <= self.num_bytes:
                break
            self._has_room.clear()
            # Released between the look and the clearing: look again at once.
            if start + rounded - self._tail > self.num_bytes:
                on_wait()
                self._has_room.wait(0.05)
        if start > head:
            self._skipped, self._skipped_to = start - head, start
        self._head = start + rounded
        self._populated = max(self._populated, start % self.num_bytes + rounded)
        return start

    def shorten(self, end: int, wanted_end: int) -> None:
        """Give back what of the last slot, which ends at position `end`, lies behind `wanted_end`."""
        if self._head == end:
            self._head = aligned(wanted_end)

    def release(self, end: int) -> None:
        """Give back every slot that ends at position `end` or before."""
        tail = max(self._tail, aligned(end))
        if self.file is not None:
            # First: what follows must not be overwritten before a reader of the file can know.
            self.file.set_tail(self._part, tail)
        self._tail = tail
        self._has_room.set()

    def release_all(self) -> None:
        """Give back every slot."""
        self.release(self._head)

    @property
    def in_use(self) -> int:
        """Bytes that are reserved."""
        return self._head - self._tail - (self._skipped if self._tail < self._skipped_to else 0)

    def bytes_at(self, position: int, num_bytes: int) -> memoryview:
        """Return the bytes of a slot."""
        start = position % self.num_bytes
        return self.view[start : start + num_bytes]

    def address_of(self, position: int) -> int:
        """Return where a slot lies in this process."""
        return self._address + position % self.num_bytes

    def copy(self, position: int, address: int, num_bytes: int) -> None:
        """Copy what is at an address of this process into a slot."""
        move = MEMMOVE if num_bytes <= _SMALL_COPY else ctypes.memmove
        move(self.address_of(position), address, num_bytes)

    def has(self, position: int, address: int, num_bytes: int) -> bool:
        """Return whether a slot that is not given back has the bytes at an address of this process."""
        return not MEMCMP(self.address_of(position), address, num_bytes)

    def holds(self, position: int, address: int, num_bytes: int) -> bool:
        """Return whether an earlier slot, given back or not, still has the bytes at an address of this process."""
        return self._head - position <= self.num_bytes and self.has(position, address, num_bytes)

    def fill_from(self, position: int, tensor: Tensor, num_bytes: int) -> None:
        """Copy the values of a dense tensor into a slot in row-major order, for any strides and device."""
        start = position % self.num_bytes
        slot = self._tensor[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
        slot.copy_(tensor.detach())

    def put(self, position: int, data: bytes) -> None:
        """Write bytes into a slot, without letting go of the interpreter lock."""
        start = position % self.num_bytes
        self.view[start : start + len(data)] = data

    def give_back(self) -> None:
        """Give the memory back to the system now: references to the ring may be collected much later."""
        self._memory.give_back()

    def leave_file(self) -> None:
        """Go on in memory of this process alone: the file belongs to the one that forked it."""
        self.file = None
        self._memory.leave_file()

    def warm(self, num_bytes: int = WARM_BYTES) -> None:
        """Map the first pages now: the first copy into a page that is not mapped takes ten times as long."""
        while self._populated < min(num_bytes, self.num_bytes):
            step = min(_POPULATE_STEP, self.num_bytes - self._populated)
            if not self._memory.populate(self._first + self._populated, step):
                # An older kernel, or another system: pages are mapped when they are first used.
                self._populated = self.num_bytes
                return
            self._populated += step


def lies_flat(tensor: Tensor) -> bool:
    """Return whether the elements are on the CPU, contiguous, in row-major order.

    Looks at attributes only: methods of torch that compute let go of the interpreter lock.
    """
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()


def require_memory(tensor: Tensor) -> None:
    """Raise if elements of `tensor` are nowhere: to read them would end the process."""
    if has_no_memory(tensor):
        raise UsageError("the tensor cannot be recorded", got="a tensor without memory", expected="one with values")


def pieces_of(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Yield flat pieces of at most `most` elements in row-major order."""
    if tensor.is_contiguous():
        flat = tensor.detach().view(-1)
        yield from (flat[start : start + most] for start in range(0, flat.numel(), most))
    else:
        for _, (piece,) in blocks.blocks(tensor, device=tensor.device):
            yield piece


class PinnedCopies:
    """Hands out copies under a limit of memory.

    Args:
        most_bytes: Of all copies that are not given back; one tensor may exceed it by itself.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._in_flight = 0
        self._lock = threading.Lock()
        self._has_room = Flag()

    @staticmethod
    def takes(tensor: Tensor) -> bool:
        """Return whether a tensor is on a device from which copies run by themselves."""
        return tensor.is_cuda

    def take(self, tensor: Tensor, num_bytes: int, on_wait: Callable[[], None]) -> tuple[Tensor, Any]:
        """Begin to copy the values of `tensor` in row-major order.

        Returns:
            The bytes, and an event to wait for before they are read.
        """
        while self._in_flight and self._in_flight + num_bytes > self._most_bytes:
            self._has_room.clear()
            on_wait()
            self._has_room.wait(0.05)
        with self._lock:
            self._in_flight += num_bytes
        target = _allocate(num_bytes)
        target.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
        return target, _event(tensor.device)

    def give_back(self, num_bytes: int) -> None:
        """Note that a copy is not needed any more."""
        with self._lock:
            self._in_flight -= num_bytes
        self._has_room.set()


def _allocate(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _event(device: torch.device) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
