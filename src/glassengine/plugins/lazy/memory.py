"""Views: tensors that read and write a part of the memory of another, in whatever way it was written since.

A view keeps how it is read from its parent. After a write to the memory it is read again; a write to a view is carried
up to the memory by the inverse of each view in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from glassengine.plugins.lazy.values import LazyCall, LazyMemory, LazyOperation, LazySpec, LazyValue

aten = torch.ops.aten

Apply = Callable[..., LazyValue]
"""Records a call of an operation, given with its arguments, values in place of tensors; returns its only result."""


class MemoryView:
    """A part of a memory, or all of it in another shape.

    Attributes:
        parent: What it was made of.
        memory: That both share.
        operation: How it is read from its parent.
        index: Which result of the operation it is.
        spec: Of which kind.
    """

    __slots__ = ("_value", "_version", "index", "memory", "operation", "parent", "spec")

    def __init__(self, parent: LazyMemory | MemoryView, operation: LazyOperation, index: int, value: LazyValue) -> None:
        self.parent = parent
        self.memory: LazyMemory = parent if type(parent) is LazyMemory else parent.memory  # type: ignore[union-attr]
        self.operation = operation
        self.index = index
        self.spec: LazySpec = value.spec
        self._value = value
        self._version = self.memory.version

    @property
    def version(self) -> int:
        """Of the memory."""
        return self.memory.version

    def get(self) -> LazyValue:
        """Return what it holds now."""
        if self._version != self.memory.version:
            read = LazyCall(self.operation, (self.parent.get(),), (), None, 0)
            self._value = LazyValue(self.spec, read, self.index)
            self._version = self.memory.version
        return self._value

    def chain(self) -> list[MemoryView]:
        """Return the views from the memory to this one."""
        found: list[MemoryView] = []
        view: LazyMemory | MemoryView = self
        while isinstance(view, MemoryView):
            found.append(view)
            view = view.parent
        return found[::-1]


Handle = LazyMemory | MemoryView


def viewed(value: LazyValue) -> bool:
    """Give a value its data if views alone make it of data that is there; return whether they do."""
    chain: list[LazyValue] = []
    current = value
    while current.data is None:
        call = current.call
        assert call is not None
        if not call.operation.target.is_view or len(call.reads) != 1:
            return False
        chain.append(current)
        current = call.reads[0]
    data = current.data
    with _disable_current_modes(), torch.no_grad():
        for one in reversed(chain):
            call = one.call
            assert call is not None
            args, kwargs = call.operation.arguments([data].__getitem__, call.numbers.__getitem__)
            made: Any = call.operation.target(*args, **kwargs)
            data = made[one.index] if isinstance(made, (list, tuple)) else made
    value.data = data
    value.call = None
    return True


def with_part(view: MemoryView, written: LazyValue, apply: Apply) -> LazyValue | None:
    """Return what the parent of a view holds when the view is written; None where there is no inverse.

    Args:
        view: That is written.
        written: What it then holds, of its kind.
        apply: Records a call.
    """
    inverse = _INVERSES.get(view.operation.target)
    return None if inverse is None else inverse(view, written, apply)


def _arguments(view: MemoryView) -> dict[str, Any]:
    """Return the arguments of a view by name, those left out with what the schema says."""
    operation = view.operation
    schema = operation.target._schema.arguments
    arguments = {argument.name: argument.default_value for argument in schema}
    arguments.update(zip((argument.name for argument in schema), operation.args, strict=False))
    arguments.update(operation.kwargs)
    return arguments


def _transposed(view: MemoryView, written: LazyValue, apply: Apply) -> LazyValue:
    if view.operation.target is aten.t.default:
        return apply(aten.t.default, written)
    given = _arguments(view)
    return apply(aten.transpose.int, written, given["dim0"], given["dim1"])


def _permuted(view: MemoryView, written: LazyValue, apply: Apply) -> LazyValue:
    dims = [dim % len(view.spec.shape) for dim in _arguments(view)["dims"]]
    return apply(aten.permute.default, written, [dims.index(dim) for dim in range(len(dims))])


def _selected(view: MemoryView, written: LazyValue, apply: Apply) -> LazyValue:
    given = _arguments(view)
    return apply(aten.select_scatter.default, view.parent.get(), written, given["dim"], given["index"])


def _unbound(view: MemoryView, written: LazyValue, apply: Apply) -> LazyValue:
    return apply(aten.select_scatter.default, view.parent.get(), written, _arguments(view)["dim"], view.index)


def _sliced(view: MemoryView, written: LazyValue, apply: Apply) -> LazyValue:
    given = _arguments(view)
    bounds = (given["dim"], given["start"], given["end"], given["step"])
    return apply(aten.slice_scatter.default, view.parent.get(), written, *bounds)


def _diagonal(view: MemoryView, written: LazyValue, apply: Apply) -> LazyValue:
    given = _arguments(view)
    place = (given["offset"], given["dim1"], given["dim2"])
    return apply(aten.diagonal_scatter.default, view.parent.get(), written, *place)


def _split(view: MemoryView, written: LazyValue, apply: Apply) -> LazyValue:
    dim = _arguments(view)["dim"]
    start = sum(kind.shape[dim] for kind in view.operation.results[: view.index] if kind is not None)
    end = start + view.spec.shape[dim]
    return apply(aten.slice_scatter.default, view.parent.get(), written, dim, start, end, 1)


def _by(inverse: OpOverload) -> Callable[[MemoryView, LazyValue, Apply], LazyValue]:
    return lambda view, written, apply: apply(inverse, written)


_INVERSES: dict[OpOverload, Callable[[MemoryView, LazyValue, Apply], LazyValue]] = {
    **dict.fromkeys(
        (
            aten.view.default, aten._reshape_alias.default, aten.unsqueeze.default, aten.squeeze.default,
            aten.squeeze.dim, aten.squeeze.dims,
        ),
        lambda view, written, apply: apply(aten.reshape.default, written, list(view.parent.spec.shape)),
    ),
    **dict.fromkeys((aten.t.default, aten.transpose.int), _transposed),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _split),
    aten.permute.default: _permuted,
    aten.select.int: _selected,
    aten.unbind.int: _unbound,
    aten.slice.Tensor: _sliced,
    aten.diagonal.default: _diagonal,
    aten.view.dtype: lambda view, written, apply: apply(aten.view.dtype, written, view.parent.spec.dtype),
    aten.view_as_real.default: _by(aten.view_as_complex.default),
    aten.view_as_complex.default: _by(aten.view_as_real.default),
    aten._conj_physical.default: _by(aten._conj_physical.default),
    aten.neg.default: _by(aten.neg.default),
}  # fmt: skip


def order_of(stride: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the dimensions from the outermost to the innermost in memory."""
    return sorted(range(len(stride)), key=lambda dim: (-stride[dim], -shape[dim], dim))
