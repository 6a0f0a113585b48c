"""Delays writes until lazy values are computed.

Operations on lazy tensors are recorded by their front end and run later, as one graph. What is delivered of one is then
a promise; whatever is delivered after it waits behind it, so that the recording has everything in the order of the
user's code.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from glassengine.capture.calls.tensor_trees import LazyTensorLike, Promise, is_computed_later
from glassengine.recording.layout.description import Facts
from glassengine.recording.layout.layout import LeftOut
from glassengine.recording.layout.statistics import light


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
                dtype = str(values.dtype).removeprefix("torch.")
                note = LeftOut(site, step, rank, reason, dtype, tuple(values.shape), light(values))
                self._writer.leave_out(note)

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
