"""The last steps of a watched run in memory, and the norms of their tensors.

Most results and gradients are never written to again, so a reference keeps their values without a copy. A site begins
with copies. When one of its tensors has stayed as it was for as long as it was held (torch counts the writes to a
tensor), later ones are held by reference; when one of these was written to after all, its values of that step are lost,
which the recording says, and the site has copies from then on. Where no write is counted (`.data`, code outside of
torch) the norm is computed again before the values are used.

A norm is one pass: where its sum of squares is finite, so are all elements. On an accelerator the norms of a step are
asked for in bulk and copied to the CPU while the next step runs.

glibc hands what is free at the end of its heap to the system, and asks for it again page by page: of a step at hidden
512 with gradients (1.1 s) that is 10,000 pages and 22 ms. So freed memory stays with the process while it is watched.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glassengine.recording.layout.layout import LeftOut
from glassengine.recording.layout.tensors import copied_norm, dtype_name, norm_of

# A view keeps all of what it is a view of: a small part of something large is copied.
_VIEW_PARTS = 4
_SMALL_BYTES = 1 << 16
# Copies that are not in use have at most this part of the memory.
_SPARE_PARTS = 4
# Between two ways to compute the norm of the same values on an accelerator.
_NORM_DIFFERENCE = 1e-5


@dataclass(eq=False, slots=True)
class Column:
    """A site of a watched run.

    Attributes:
        site: Its name.
        number: Of its series; None where it has none.
        reason: Why only its statistics are recorded; None where its values are.
        facts: What else a recording says of it.
        copies: Whether its tensors are copied.
        must_copy: Whether they always are.
    """

    site: str
    number: int | None
    reason: str | None
    facts: dict[str, Any]
    copies: bool = True
    must_copy: bool = False


@dataclass(eq=False, slots=True)
class StepItem:
    """A tensor of a step.

    Attributes:
        column: Its site, the first one where the same tensor comes at several.
        dtype: torch dtype name.
        shape: Sizes.
        tensor: What was seen, detached; None where it is let go.
        version: How often it had been written to then; None where that is not counted.
        copy: Its values then, if they were copied.
        norm: Of the finite elements; NaN where it is not known (yet).
        num_nonfinite: Other elements; -1 where there are some and their number is not known.
        lost: Why the values are not there.
        nbytes: Memory that is held for it.
    """

    column: Column
    dtype: torch.dtype
    shape: torch.Size
    tensor: Tensor | None
    version: int | None
    copy: Tensor | None = None
    norm: float = math.nan
    num_nonfinite: int = 0
    lost: str | None = None
    nbytes: int = 0

    def is_untouched(self) -> bool:
        """Whether the tensor is held and was not written to, as far as that is counted."""
        return self.tensor is not None and self.tensor._version == self.version

    def values(self) -> Tensor | None:
        """Return the values of then; None where they are lost: `lost` then says why."""
        if self.copy is not None or self.tensor is None:
            return self.copy
        if not self.is_untouched():
            self.lost = "it was written to before it was copied; later ones of this site are copied"
        elif not self._is_as_measured(self.tensor):
            self.lost = "its memory was used for something else unnoticed; later ones of this site are copied"
        else:
            return self.tensor
        self.column.copies = self.column.must_copy = True
        return None

    def _is_as_measured(self, tensor: Tensor) -> bool:
        if tensor.untyped_storage().nbytes() < tensor.element_size() * (tensor.numel() > 0):
            return False  # as sharded parameters do with theirs
        if math.isnan(self.norm):
            return True  # not measured: of whole numbers, say
        norm, num_nonfinite = norm_of(tensor)
        most = 0.0 if tensor.is_cpu else _NORM_DIFFERENCE * self.norm
        return abs(norm - self.norm) <= most and self.num_nonfinite in (num_nonfinite, -1)


@dataclass(eq=False)
class HeldStep:
    """What is known of a step.

    Attributes:
        step: Its number.
        items: (site, tensor) in the order in which they came; notes of what has no values among them.
        numbers: Numbers that are not of a site, by name.
        token_ids: What each row was given.
        stopped: What ended it before it was through.
        is_recorded: Whether it is in the recording.
        num_cut: How many of its first tensors are let go.
    """

    step: int
    items: list[tuple[Column, StepItem] | LeftOut] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    token_ids: Sequence[Sequence[int]] = ()
    stopped: str | None = None
    is_recorded: bool = False
    num_cut: int = 0
    known: dict[tuple[Any, ...], StepItem] = field(default_factory=dict)
    storages: set[int] = field(default_factory=set)


class StepBuffer:
    """Holds steps under a limit of memory.

    Attributes:
        most_steps: The same; may grow.
        ended: Ended steps, the oldest first.
        open: Steps that have not ended.
        num_cut: Tensors that were let go before their step was too old.
    """

    def __init__(self, most_bytes: int, most_steps: int) -> None:
        self.ended: deque[HeldStep] = deque()
        self.open: dict[int, HeldStep] = {}
        self.num_cut = 0
        self._most_bytes = most_bytes
        self.most_steps = most_steps
        self._nbytes = 0
        self._spare: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
        self._spare_bytes = 0
        self._leaving: HeldStep | None = None

    def step(self, number: int) -> HeldStep:
        """Return an open step."""
        found = self.open.get(number)
        if found is None:
            found = self.open[number] = HeldStep(number)
        return found

    def take(self, number: int, column: Column, tensor: Tensor, place: int) -> tuple[StepItem, bool]:
        """Hold a tensor of an open step; return it, and whether it is a new one."""
        # Memory that is given back at once goes to the system, which is slow: it goes as fast as it is asked for again.
        self._leave(1)
        held = self.open.get(number) or self.step(number)
        version = None if tensor.is_inference() else tensor._version
        key = (place, version, tensor.shape, tensor.dtype, tensor.stride(), tensor.is_neg(), tensor.is_conj())
        item = held.known.get(key)
        if item is not None and item.tensor is not None and version is not None:
            held.items.append((column, item))
            return item, False
        tensor = tensor.detach()
        item = StepItem(column, tensor.dtype, tensor.shape, tensor, version)
        held.items.append((column, item))
        self._hold(held, item, tensor, key)
        return item, True

    def _hold(self, held: HeldStep, item: StepItem, tensor: Tensor, key: tuple[Any, ...]) -> None:
        column, nbytes = item.column, tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        whole = storage.nbytes()
        is_part = whole > _VIEW_PARTS * nbytes and whole > _SMALL_BYTES
        if column.copies or item.version is None or is_part:
            item.copy = self._copied(item, tensor, nbytes)
            item.nbytes = nbytes
            if column.must_copy or item.version is None or is_part:
                item.tensor = None  # nothing more is to be learned of it
        if item.tensor is not None:
            held.known[key] = item
            address = storage.data_ptr()
            if address not in held.storages:
                held.storages.add(address)
                item.nbytes += whole
        self._nbytes += item.nbytes
        if self._nbytes > self._most_bytes:
            self._make_room(held)

    def end(self, number: int, token_ids: Sequence[Sequence[int]], stopped: str | None) -> HeldStep:
        """End an open step, and let go of one that is too old."""
        held = self.open.pop(number, None) or HeldStep(number)
        held.token_ids, held.stopped = token_ids, stopped
        held.known.clear()
        held.storages.clear()
        self.ended.append(held)
        self._leave()
        while len(self.ended) > self.most_steps:
            self._leave()
            self._leaving = self.ended.popleft()
        return held

    def clear(self) -> None:
        """Let go of everything."""
        self._leave()
        for held in (*self.ended, *self.open.values()):
            self.let_go(held)
        self.ended.clear()
        self.open.clear()
        self._spare.clear()

    def _leave(self, count: int | None = None) -> None:
        """Let go of so many tensors of the step that is too old; None is all of them."""
        held = self._leaving
        if held is None:
            return
        end = len(held.items) if count is None else min(held.num_cut + count, len(held.items))
        for found in held.items[held.num_cut : end]:
            if isinstance(found, tuple):
                self._release(found[1])
        held.num_cut = end
        if end == len(held.items):
            self._leaving = None

    def _make_room(self, current: HeldStep) -> None:
        self._leave()
        for held in (*self.ended, *(self.open[number] for number in sorted(self.open)), current):
            while held.num_cut < len(held.items):
                if self._nbytes <= self._most_bytes:
                    return
                found = held.items[held.num_cut]
                held.num_cut += 1
                if isinstance(found, tuple) and found[1].nbytes:
                    self.num_cut += not held.is_recorded
                    found[1].lost = f"the {self._most_bytes} bytes that the watch may hold were used up"
                    self._release(found[1])

    def let_go(self, held: HeldStep) -> None:
        """Give the memory of a step back."""
        for found in held.items:
            if isinstance(found, tuple):
                self._release(found[1])
        held.num_cut = len(held.items)

    def _release(self, item: StepItem) -> None:
        """Give memory back, and note whether the tensor has stayed as it was."""
        if item.tensor is not None:
            is_untouched = item.is_untouched()
            item.column.must_copy = item.column.must_copy or not is_untouched
            item.column.copies = item.column.must_copy
        is_spare = item.column.must_copy and item.copy is not None and item.copy.is_cpu
        if is_spare and self._spare_bytes < self._most_bytes // _SPARE_PARTS:
            assert item.copy is not None
            self._spare.setdefault((item.dtype, item.shape), []).append(item.copy)
            self._spare_bytes += item.copy.numel() * item.copy.element_size()
        self._nbytes -= item.nbytes
        item.nbytes = 0
        item.tensor = item.copy = None
        item.lost = item.lost or "the watch did not hold it any more"

    def _copied(self, item: StepItem, tensor: Tensor, nbytes: int) -> Tensor:
        spare = self._spare.get((tensor.dtype, tensor.shape))
        with torch.no_grad():
            if not tensor.is_cpu:
                return tensor.clone(memory_format=torch.contiguous_format)
            if spare:
                self._spare_bytes -= nbytes
                room = spare.pop()
            else:
                room = torch.empty(tensor.shape, dtype=tensor.dtype)
            # In one way through memory, where that can be.
            norm = copied_norm(room, tensor)
            if norm is None:
                return room.copy_(tensor)
            item.norm = norm
            return room


def note_of(column: Column, item: StepItem, step: int, rank: int) -> LeftOut:
    """Return what a recording says of a tensor whose values are lost."""
    reason = f"{item.lost}; norm {item.norm:.9g}" if not math.isnan(item.norm) else str(item.lost)
    return LeftOut(column.site, step, rank, reason, dtype_name(item.dtype), tuple(item.shape))


MEASURED = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128))
"""Others (whole numbers, truth values, eight bits) have no series."""
# References to what waits are held as long: not too much, nor too many.
_MOST_BYTES = 64 << 20
_MOST_TENSORS = 512


@dataclass(eq=False, slots=True)
class Number:
    """A number that is not of a site.

    Attributes:
        norm: Its value; NaN where that is not known (yet).
    """

    norm: float = math.nan


class DeviceNorms:
    """Norms of the tensors of one step that are not on the CPU."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[torch.device, torch.dtype], list[tuple[StepItem, Tensor]]] = {}
        self._num_waiting = self._bytes_waiting = 0
        self._asked: list[tuple[Sequence[StepItem | Number], Tensor]] = []
        self._copies: list[tuple[list[StepItem | Number], Tensor, Any]] = []

    def add(self, item: StepItem, tensor: Tensor) -> None:
        """Measure a tensor soon; not one that is written to until then."""
        self._waiting.setdefault((tensor.device, tensor.dtype), []).append(
            (item, tensor.detach() if item.copy is None else item.copy)
        )
        self._num_waiting += 1
        self._bytes_waiting += tensor.numel() * tensor.element_size()
        if item.column.copies or self._num_waiting >= _MOST_TENSORS or self._bytes_waiting >= _MOST_BYTES:
            self._ask()

    def add_number(self, value: Tensor) -> Number:
        """Bring a number to the CPU with the norms."""
        found = Number()
        self._asked.append(([found], value.detach().reshape(1).float()))
        return found

    def end(self) -> bool:
        """Ask for what is left, and begin to copy the answers; return whether there are any."""
        self._ask()
        by_device: dict[torch.device, list[tuple[Sequence[StepItem | Number], Tensor]]] = {}
        for items, norms in self._asked:
            by_device.setdefault(norms.device, []).append((items, norms))
        for device, some in by_device.items():
            together = torch.cat([norms for _, norms in some])
            items = [item for items, _ in some for item in items]
            copy = together.to("cpu", non_blocking=device.type == "cuda")
            event = None
            if device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
            self._copies.append((items, copy, event))
        self._asked.clear()
        return bool(self._copies)

    def finish(self) -> None:
        """Wait for the answers, and note them."""
        for items, copy, event in self._copies:
            if event is not None:
                event.synchronize()
            for item, norm in zip(items, copy.tolist(), strict=True):
                if math.isfinite(norm) or isinstance(item, Number):
                    item.norm = norm
                else:
                    _look_closer(item)
        self._copies.clear()

    def _ask(self) -> None:
        for some in self._waiting.values():
            left = [(item, tensor) for item, tensor in some if item.copy is not None or item.is_untouched()]
            items, tensors = [item for item, _ in left], [tensor for _, tensor in left]
            if not items:
                continue
            self._asked.append((items, torch.stack(list(norms_of(tensors))).float()))
        self._waiting.clear()
        self._num_waiting = self._bytes_waiting = 0


def norms_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the norms of tensors of one device and dtype, in few launches where torch can do that."""
    dtype = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else None
    with torch.no_grad():
        if not tensors[0].is_complex():
            flat = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
            return torch._foreach_norm(flat, 2, dtype)
        return [torch.linalg.vector_norm(tensor) for tensor in tensors]


def _look_closer(item: StepItem) -> None:
    """Count what is not finite, where the values are still there."""
    values = item.values()
    if values is None:
        item.num_nonfinite = -1
    else:
        item.norm, item.num_nonfinite = norm_of(values)


# Of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# What glibc arrives at by itself where blocks are large.
_LARGEST_BLOCK = 32 << 20
_MOST = (1 << 31) - 1


def retain_freed_memory(most_bytes: int) -> Callable[[], None]:
    """Let the process keep so much memory that is free, and return what ends that and gives it back."""
    if platform.libc_ver()[0] != "glibc" or not most_bytes:
        return lambda: None
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
    libc.mallopt(_TRIM_THRESHOLD, min(most_bytes, _MOST))

    def end() -> None:
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_BLOCK)
        libc.malloc_trim(0)

    return end
