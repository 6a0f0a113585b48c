"""Public functions: make tensors and modules lazy, run their graphs, and list pending ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch

from glassengine.backends.registry import choose_graph_backend
from glassengine.errors import UnknownNameError, UsageError
from glassengine.plugins.lazy.devices import register
from glassengine.plugins.lazy.eager_fallback import fallbacks
from glassengine.plugins.lazy.graphs import captured, pending, place_of
from glassengine.plugins.lazy.settings import settings
from glassengine.plugins.lazy.tensor import DEVICE, LazyTensor
from glassengine.plugins.lazy.values import LazyValue, pending_memories
from glassengine.results.lazy import PendingTensor

M = TypeVar("M", bound=torch.nn.Module)
Mode = Literal["lazy", "eager_debug"]
_MODES: tuple[Mode, ...] = ("lazy", "eager_debug")

__all__ = [
    "LazyTensor", "device", "fallbacks", "graph", "is_lazy", "mark_dynamic", "mode", "module", "pending_tensors",
    "tensor", "text",
]  # fmt: skip


def device() -> torch.device:
    """Return the lazy device: operations on tensors moved there are recorded, and run when a value is needed."""
    register()
    return DEVICE


def tensor(data: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False) -> LazyTensor:
    """Return a lazy tensor, a leaf of autograd, with a copy of `data`.

    Args:
        data: A tensor, an array, or numbers.
        dtype: Of the tensor; None for that of the data.
        requires_grad: Whether autograd computes its gradient.
    """
    register()
    if isinstance(data, torch.Tensor):
        with torch.no_grad():
            made = data.detach().to(device=DEVICE, dtype=dtype, copy=True)
    else:
        made = torch.as_tensor(data, dtype=dtype).to(DEVICE)
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


def module(target: M) -> M:
    """Move the parameters and buffers of a module to the lazy device, in place, and return it."""
    register()
    return target.to(DEVICE)


def mark_dynamic(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    """Say that sizes of a tensor change from step to step, and return it: its graphs are compiled for all sizes.

    Sizes of 0 and 1 are compiled by themselves. `torch._dynamo.mark_dynamic`, called before the tensor is moved to the
    lazy device, does the same.

    Args:
        tensor: A lazy tensor that holds data, as one that was moved to the lazy device.
        dims: The dimensions; none for all of them.

    Raises:
        UsageError: It is no lazy tensor, or its value is computed.
        IndexError: It has no such dimension.
    """
    (value,) = _values(tensor)
    if value.data is None:
        raise UsageError("the sizes of this tensor follow from others", got="a tensor that is computed",
            hint="mark the tensors that are moved to the lazy device")  # fmt: skip
    rank = len(value.spec.shape)
    for dim in dims:
        if not -rank <= dim < rank:
            raise IndexError(f"dimension {dim} of a tensor with {rank}")
    value.dynamic |= {dim % rank for dim in dims or range(rank)}
    return tensor


def is_lazy(value: object) -> bool:
    """Return whether a value is a lazy tensor, or a module that has one."""
    if isinstance(value, torch.nn.Module):
        return any(isinstance(part, LazyTensor) for part in (*value.parameters(), *value.buffers()))
    return isinstance(value, LazyTensor)


@contextlib.contextmanager
def mode(mode: Mode = "lazy", *, backend: str | None = None) -> Iterator[torch.device]:
    """Set how graphs of lazy tensors are compiled and run while the block runs, in every thread.

    What is pending at the end of the block stays pending.

    Args:
        mode: "lazy" for graphs as large as possible; "eager_debug" compiles and runs each operation by itself.
        backend: Which back-end compiles them: "inductor", "eager", ...; None takes the default one.

    Yields:
        The lazy device.

    Raises:
        UnknownNameError: A mode or a back-end that there is not.
        BackendError: The back-end cannot be used here.
        UsageError: It builds engines only.
    """
    if mode not in _MODES:
        raise UnknownNameError("mode", str(mode), _MODES, hint='glass.lazy.mode("eager_debug")')
    before = settings.backend, settings.each_op
    settings.backend, settings.each_op = choose_graph_backend(backend), mode == "eager_debug"
    try:
        yield device()
    finally:
        settings.backend, settings.each_op = before


def pending_tensors() -> tuple[PendingTensor, ...]:
    """Return the tensors that have no value yet, in the order in which they were written."""
    found = []
    for memory in pending_memories():
        call = memory.value.call
        assert call is not None
        place = place_of(call.code, call.lasti) if call.code is not None else ("", 0, "")
        where = f"{place[0]}:{place[1]}" if place[0] else ""
        kind = memory.spec
        dtype = str(kind.dtype).removeprefix("torch.")
        found.append(PendingTensor(dtype, tuple(kind.shape), str(call.operation.target), where))
    return tuple(found)


def graph(tensors: torch.Tensor | Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Return the graph that would run for the values of these lazy tensors; it has no operations where nothing would.

    Each node keeps the user's line that recorded it in `meta["stack_trace"]`.

    Raises:
        UsageError: One of them is not lazy.
    """
    values = _values(tensors)
    waiting = [value for value in values if value.data is None]
    return captured(pending(waiting), frozenset(), {})[0].module


def text(tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """Return the graph that would run for the values of these lazy tensors, a line for each operation.

    Raises:
        UsageError: One of them is not lazy.
    """
    values = [value for value in _values(tensors) if value.data is None]
    if not values:
        return "nothing is pending"
    made, *_ = captured(pending(values), frozenset(), {})
    lines = []
    for line, node in zip(made.lines, made.nodes, strict=True):
        where = made.describe(node)
        lines.append(f"{line}  # {where}" if where else line)
    return "\n".join(lines)


def _values(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[LazyValue]:
    found = []
    for one in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        if not isinstance(one, LazyTensor):
            raise UsageError("this is no lazy tensor", got=type(one).__name__, hint="tensor.to(glass.lazy.device())")
        found.append(one._lazy.get())
    return found
