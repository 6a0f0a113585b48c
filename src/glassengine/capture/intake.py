"""Takes tensors of any kind from a running model and hands to the recording what its policy asks for.

Sparse, quantized, nested, distributed and wrapped tensors are taken apart; of a key/value cache a step records the rows
that it adds. Operations on lazy tensors run later, as one graph: what is delivered after one of them waits behind it,
so that the recording keeps the order of the user's code. Nothing here raises into the model but what its own signal
handlers do: a tensor that cannot be recorded is noted with the reason.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Unpack, cast

import torch
from torch import Tensor
from torch._C import _DisableFuncTorch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_get_bdim

from glassengine.capture.calls import KV_AXES, LazyTensorLike, Promise, is_computed_later
from glassengine.capture.observed_call import is_interruption
from glassengine.recording.layout.description import Facts
from glassengine.recording.layout.layout import ADDED, ADDED_AXIS, LeftOut, Sharding
from glassengine.recording.layout.tensors import dtype_name, light, why_not
from glassengine.recording.write.policy import NO_VALUES, RecordingPolicy


def untransformed(tensor: Tensor) -> Tensor:
    """Return the values of what `torch.func` (vmap, grad, jvp) passes around, the mapped dimensions first.

    To be called, and its result to be used, under `_DisableFuncTorch`.
    """
    while is_functorch_wrapped_tensor(tensor):
        mapped = maybe_get_bdim(tensor)
        tensor = get_unwrapped(tensor)
        if mapped >= 0:
            tensor = tensor.movedim(mapped, 0)
    return tensor


def sharding_of(tensor: Tensor) -> Sharding | None:
    """Return how a distributed tensor is spread over processes; None of any other."""
    if type(tensor).__name__ != "DTensor":
        return None
    whole: Any = tensor
    mesh = whole.device_mesh
    return Sharding(
        shape=tuple(whole.shape),
        placements=tuple(map(_placement, whole.placements)),
        mesh=tuple(mesh.shape),
        names=tuple(mesh.mesh_dim_names or ()),
        coordinate=tuple(mesh.get_coordinate() or ()),
        ranks=tuple(mesh.mesh.flatten().tolist()),
    )


def _placement(placement: Any) -> str:
    # Not every version of torch says how what is partial is reduced.
    return f"P({placement.reduce_op})" if placement.is_partial() else str(placement)


def waited(tensor: Tensor) -> Tensor:
    """Return the values of a collective operation that may still be running, once it has ended; others as they are."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    running: Any = tensor
    done: Tensor = running.trigger_wait()
    return done


def parts_of(tensor: Tensor) -> list[tuple[str, Tensor]] | None:
    """Return the plain tensors that a tensor of another kind consists of, by key; None if unknown."""
    if (done := waited(tensor)) is not tensor:
        return [("", done)]
    if tensor.layout is torch.sparse_coo:
        whole = tensor.detach().coalesce()
        return [(".indices", whole.indices()), (".values", whole.values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [(f".{name}", getattr(tensor.detach(), name)()) for name in ("crow_indices", "col_indices", "values")]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [(f".{name}", getattr(tensor.detach(), name)()) for name in ("ccol_indices", "row_indices", "values")]
    if tensor.layout is not torch.strided and not hasattr(tensor, "__tensor_flatten__"):
        return None
    if tensor.is_nested and not hasattr(tensor, "__tensor_flatten__"):
        # Concatenated sequences of different lengths; not contiguous if transposed.
        whole = tensor.detach().contiguous()
        return [(".values", whole.values()), (".sizes", whole._nested_tensor_size())]
    if tensor.is_quantized:
        return [(".int_repr", tensor.int_repr()), *_quantization(tensor)]
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [(f".{name.lstrip('_')}", getattr(tensor, name)) for name in names]
    plain = tensor.detach().as_subclass(Tensor)
    return [("", plain)] if type(plain) is Tensor else None


def _quantization(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield ".scale", torch.tensor(tensor.q_scale(), dtype=torch.float64)
        yield ".zero_point", torch.tensor(tensor.q_zero_point())
    else:
        yield ".scale", tensor.q_per_channel_scales()
        yield ".zero_point", tensor.q_per_channel_zero_points()


_PLAIN = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})

_MOST_BACKWARDS = 64
_KV_DIMS = 4
_ANOTHER = "the step has another tensor of that name"

_log = logging.getLogger(__name__)


class Intake:
    """Where hooks deliver tensors.

    Args:
        writer: Gets what is wanted.
        policy: Says what is wanted.
        rank: Of this process.
        keeps_every_step: Whether the writer keeps all steps that end, so that one may refer to the one before.

    Attributes:
        num_late: Tensors of steps that had been completed already.
        takes_again: Whether what a second backward of a step computes again is recorded, too.
    """

    def __init__(self, writer: Writer, policy: RecordingPolicy, rank: int, *, keeps_every_step: bool = False) -> None:
        self.num_late = 0
        self.takes_again = True
        self._writer = writer
        self._again = writer.take_repeat
        self._policy = policy
        self._rank = rank
        self._has_budget = policy.has_budget
        self._growing = GrowingTensors() if keeps_every_step and not policy.has_budget else None
        self._known: dict[str, tuple[bool, bool]] = {}
        self._committed: set[int] = set()
        self._names: dict[int, set[str]] = {}
        self._backwards: dict[int, int] = {}

    def take(self, site: str, step: int, tensor: Tensor, *, axes: Mapping[str, int] | None = None) -> None:
        """Record `tensor` as it is now, if it is wanted; the parts of a tensor that is not plain each for itself."""
        names = self._names.get(step)
        # The short ways of nearly all tensors; hooks run thousands of times a second.
        is_usual = type(tensor) is Tensor and not self._has_budget
        if is_usual and names is not None and site not in names:
            try:
                if self._again(site, step, tensor, self._rank):
                    names.add(site)
                    return
            except Exception as error:
                if is_interruption(error):
                    raise
                # One without shape or memory of its own, though its type is the usual one.
                is_usual = False
        wanted, keeps = self._known.get(site) or self._look(site)
        if not wanted:
            return
        if names is None and step not in self._committed:
            names = self._names.setdefault(step, set())
        if is_usual and names is not None and site not in names:
            try:
                if keeps:
                    self._writer.write(site, step, tensor, rank=self._rank, axes=axes)
                    names.add(site)
                    return
                if self._writer.measure(site, step, tensor, rank=self._rank, reason=NO_VALUES):
                    names.add(site)
                    return
            except Exception as error:
                if is_interruption(error):
                    raise
                _log.debug("%s takes the long way", site, exc_info=True)
        self._take(site, step, tensor, keeps, axes)

    def take_cache(self, site: str, step: int, tensor: Tensor, axes: Mapping[str, int] = KV_AXES) -> None:
        """Record a part of a key/value cache; only the rows that the step adds, where it does nothing else to it.

        Args:
            site: Site name.
            step: Number of the step.
            tensor: [batch, head, position, channel] where it has four dimensions.
            axes: What is known of these.
        """
        known = self._known.get(site) or self._look(site)
        is_new = step not in self._committed and not {site, site + ADDED} & self._names.get(step, set())
        is_usual = tensor.dim() == _KV_DIMS and type(tensor) is Tensor and not is_functorch_wrapped_tensor(tensor)
        rows = None
        if self._growing is not None and all(known) and is_new and is_usual and why_not(tensor) is None:
            rows = self._growing.added(site, step, tensor)
        if rows is not None:
            self._known[site + ADDED] = known
            self.take(site + ADDED, step, rows, axes={**axes, ADDED_AXIS: KV_AXES["cache"]})
        elif site + ADDED in self._names.get(step, ()):
            self._leave_out(site, step, _ANOTHER, None)
        else:
            self.take(site, step, tensor, axes=axes if tensor.dim() == _KV_DIMS else None)

    def _look(self, site: str) -> tuple[bool, bool]:
        found = self._known[site] = self._policy.wants(site)
        return found

    def _take(self, site: str, step: int, tensor: Tensor, keeps: bool, axes: Mapping[str, int] | None) -> None:
        try:
            if is_functorch_wrapped_tensor(tensor):
                with _DisableFuncTorch():
                    self._take(site, step, untransformed(tensor), keeps, None)
            elif is_computed_later(tensor):
                self._wait()
                if self._enter(site, step):
                    self._take_plain(site, step, cast(Tensor, tensor), keeps, axes)
            elif not _is_plain(tensor):
                self._take_parts(site, step, tensor, keeps, axes)
            elif self._enter(site, step):
                self._take_plain(site, step, tensor, keeps, axes)
        except Exception as error:
            if is_interruption(error):
                raise
            _log.debug("%s is not recorded", site, exc_info=True)
            self._leave_out(site, step, f"{type(error).__name__}: {error}"[:500], None)

    def _wait(self) -> None:
        if not isinstance(self._writer, DeferredWriter):
            self._writer = DeferredWriter(self._writer)
            self._again = self._writer.take_repeat

    def finish(self, why: str) -> None:
        """Hand over what waits for values that are not computed yet, and compute these now, for `why`."""
        if isinstance(self._writer, DeferredWriter):
            self._writer.finish(why)

    def note_backward(self, step: int) -> None:
        """Note that the backward that runs in this thread is that of `step`."""
        number = torch._C._current_graph_task_id()
        if number not in self._backwards:
            if len(self._backwards) >= _MOST_BACKWARDS:
                del self._backwards[next(iter(self._backwards))]
            self._backwards[number] = step

    def step_of_backward(self) -> int | None:
        """Return the step whose backward runs in this thread; None where nothing is known of it."""
        return self._backwards.get(torch._C._current_graph_task_id())

    def has_ended(self, step: int) -> bool:
        """Return whether `step` is complete: what comes for it is too late."""
        return step in self._committed

    def commit(self, step: int, *, token_ids: Sequence[Sequence[int]] = (), stopped: str | None = None) -> None:
        """Complete `step`."""
        self._committed.add(step)
        self._names.pop(step, None)
        self._writer.commit(step, token_ids=token_ids, stopped=stopped)

    def hold(self, step: int, *, token_ids: Sequence[Sequence[int]] = ()) -> None:
        """Note that the forward, a backward or an update of `step` has ended, and that the step goes on."""
        if step not in self._committed:
            self._writer.hold(step, token_ids=token_ids)

    def leave_out(self, site: str, step: int, reason: str) -> None:
        """Note that nothing could be seen of a wanted site."""
        if self._policy.wants(site)[0]:
            self._leave_out(site, step, reason, None)

    def _enter(self, site: str, step: int) -> bool:
        """Whether `step` is open and does not have `site` yet."""
        if step in self._committed:
            self.num_late += 1
            return False
        names = self._names.setdefault(step, set())
        if site in names:
            self._leave_out(site, step, _ANOTHER, None)
            return False
        names.add(site)
        return True

    def _take_plain(
        self,
        site: str,
        step: int,
        tensor: Tensor,
        keeps: bool,
        axes: Mapping[str, int] | None,
        sharding: Sharding | None = None,
    ) -> None:
        obstacle = why_not(tensor)
        if obstacle is not None:
            self._leave_out(site, step, obstacle, tensor)
        elif not keeps:
            self._leave_out(site, step, NO_VALUES, tensor, measure=True)
        elif (over := self._policy.obstacle(tensor.nbytes)) is not None:
            self._leave_out(site, step, over, tensor, measure=True)
        else:
            self._writer.write(site, step, tensor, rank=self._rank, axes=axes, sharding=sharding)

    def _take_parts(self, site: str, step: int, tensor: Tensor, keeps: bool, axes: Mapping[str, int] | None) -> None:
        sharding = sharding_of(tensor)
        if sharding is not None:
            self._take_shard(site, step, tensor, keeps, axes, sharding)
            return
        parts = parts_of(tensor)
        if parts is None:
            self._leave_out(site, step, f"a tensor of type {type(tensor).__name__} has no plain parts", tensor)
            return
        for key, part in parts:
            port = ":out" if key and ":" not in site else ""  # a part of a plain path is a part of its output
            self._take(f"{site}{port}{key}", step, part, keeps, None if key else axes)

    def _take_shard(
        self, site: str, step: int, tensor: Any, keeps: bool, axes: Mapping[str, int] | None, sharding: Sharding
    ) -> None:
        local = waited(tensor.detach().to_local())
        if not _is_plain(local):
            self._leave_out(site, step, f"a {sharding} whose local part is not a plain tensor", None)
        elif self._enter(site, step):
            self._take_plain(site, step, local, keeps, axes, sharding)

    def _leave_out(self, site: str, step: int, reason: str, tensor: Tensor | None, *, measure: bool = False) -> None:
        dtype = shape = statistics = None
        if tensor is not None:
            if measure and self._writer.measure(site, step, tensor, rank=self._rank, reason=reason):
                return
            dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
            statistics = light(tensor) if measure else None
        self._writer.leave_out(LeftOut(site, step, self._rank, reason, dtype, shape, statistics))


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided
    return type(tensor) in _PLAIN and strided and not (tensor.is_quantized or tensor.is_nested)


class StepCounter:
    """Numbers what happens in all threads, from 0 on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_begun = 0

    def next(self) -> int:
        """Return the number of a step that begins."""
        with self._lock:
            self.num_begun += 1
            return self.num_begun - 1


_SPARE = 1.5
"""Capacity of a new copy, in rows of the cache: all copies of a generation of n rows have about 3 n rows together."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GrowingTensors:
    """Copies of the caches of the last step, in memory of the host."""

    def __init__(self) -> None:
        self._axis = KV_AXES["cache"]
        self._lock = threading.Lock()
        # Site -> step, rows, and a copy of these that may have room for more.
        self._last: dict[str, tuple[int, int, Tensor]] = {}

    def added(self, site: str, step: int, tensor: Tensor) -> Tensor | None:
        """Return the rows, maybe none, that `step` adds; None unless the others are bitwise those of the step before.

        Steps of several threads end in any order. Only numbers that follow each other have no step in between.
        """
        if tensor.itemsize not in _WORDS or tensor.is_complex():
            return None
        values = tensor.detach().to("cpu").view(_WORDS[tensor.itemsize])
        count = values.shape[self._axis]
        with self._lock:
            before, size, copy = self._last.pop(site, (-1, 0, values))
            is_next = before == step - 1 and 0 < size <= count
            if not (is_next and torch.equal(self._rows(copy, 0, size), self._rows(values, 0, size))):
                size = 0
            first = size
            if not size or copy.shape[self._axis] < count:
                shape = list(values.shape)
                shape[self._axis] = int(count * _SPARE) + 1
                copy, first = torch.empty(shape, dtype=values.dtype, device="cpu"), 0
            self._rows(copy, first, count).copy_(self._rows(values, first, count))
            self._last[site] = (step, count, copy)
        return self._rows(values, size, count).contiguous().view(tensor.dtype) if size else None

    def _rows(self, tensor: Tensor, first: int, end: int) -> Tensor:
        return tensor.narrow(self._axis, first, end - first)


class Writer(Protocol):
    """What takes the tensors: a `BackgroundWriter`, or something that only counts."""

    def take_repeat(self, site: str, step: int, tensor: Tensor, rank: int) -> bool:
        """Take a tensor that comes as it did in an earlier step, if the writer remembers that."""

    def write(self, site: str, step: int, tensor: Tensor, *, rank: int = 0, **facts: Unpack[Facts]) -> None:
        """Take values."""

    def measure(self, site: str, step: int, tensor: Tensor, *, rank: int, reason: str) -> bool:
        """Take note of a tensor whose values are not wanted, if the writer measures it."""

    def leave_out(self, item: LeftOut) -> None:
        """Take note of a tensor without values."""

    def hold(self, step: int, *, token_ids: Sequence[Sequence[int]] = ()) -> None:
        """Take note that the forward of a step has ended, and that the step goes on."""

    def commit(self, step: int, *, token_ids: Sequence[Sequence[int]] = (), stopped: str | None = None) -> None:
        """Complete a step."""


class DeferredWriter:
    """Passes on to a writer what it takes, as soon as all values before it are computed."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._waiting: deque[tuple[Promise | None, Callable[[Any], object]]] = deque()
        self._lock = threading.RLock()
        self._promising: LazyTensorLike | None = None

    def take_repeat(self, site: str, step: int, tensor: Tensor, rank: int) -> bool:
        """Take a plain tensor where nothing waits."""
        return not self._waiting and self._writer.take_repeat(site, step, tensor, rank)

    def write(self, site: str, step: int, tensor: Tensor, *, rank: int = 0, **facts: Unpack[Facts]) -> None:
        """Take values."""
        self._put(site, tensor, lambda values: self._writer.write(site, step, values, rank=rank, **facts))

    def measure(self, site: str, step: int, tensor: Tensor, *, rank: int, reason: str) -> bool:
        """Take note of a tensor whose values are not wanted; True, since it is measured in any case."""

        def measure(values: Tensor) -> None:
            if not self._writer.measure(site, step, values, rank=rank, reason=reason):
                dtype, shape = dtype_name(values.dtype), tuple(values.shape)
                self._writer.leave_out(LeftOut(site, step, rank, reason, dtype, shape, light(values)))

        self._put(site, tensor, measure)
        return True

    def leave_out(self, item: LeftOut) -> None:
        """Take note of a tensor without values."""
        self._put("", None, lambda _: self._writer.leave_out(item))

    def hold(self, step: int, *, token_ids: Sequence[Sequence[int]] = ()) -> None:
        """Take note that the forward of a step has ended, and that the step goes on."""
        self._put("", None, lambda _: self._writer.hold(step, token_ids=token_ids))

    def commit(self, step: int, *, token_ids: Sequence[Sequence[int]] = (), stopped: str | None = None) -> None:
        """Complete a step."""
        self._put("", None, lambda _: self._writer.commit(step, token_ids=token_ids, stopped=stopped))

    def finish(self, why: str) -> None:
        """Pass on everything, computed now where need be."""
        if self._waiting and self._promising is not None:
            self._promising.keep_promises(why)
        self._pass_on()

    def _put(self, site: str, tensor: Tensor | None, take: Callable[[Any], object]) -> None:
        with self._lock:
            promise: Promise | None = None
            values = tensor
            if tensor is not None and is_computed_later(tensor):
                self._promising = tensor
                promise = tensor.promised(site, self._pass_on)
            elif tensor is not None and self._waiting:
                with torch.no_grad():
                    values = tensor.detach().clone()  # its owner may write to it before its turn comes
            self._waiting.append((promise, take if promise is not None else lambda _: take(values)))
        self._pass_on()

    def _pass_on(self) -> None:
        with self._lock:
            while self._waiting:
                promise, take = self._waiting[0]
                data = None if promise is None else promise.data
                if promise is not None and data is None:
                    return
                self._waiting.popleft()
                take(data)
