"""The recorded graph: values, and the operations that make them.

A value never changes. One that an operation makes refers to the operation, and that to the values it reads, and to
nothing that comes after it: what no tensor needs any more is freed by itself. A value that was computed or brought in
holds its data and refers to no operation.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch._ops import OpOverload

_numbers = itertools.count()

NUMBER_DTYPES = {float: torch.float64, int: torch.int64}
"""Type of a number -> dtype of the input that holds it."""


class LazySpec:
    """The kind of a value: there is one object for each, so that kinds are compared by identity.

    Attributes:
        dtype: Of the elements.
        shape: Sizes.
        stride: In elements.
        offset: Of the first element in its memory; 0 where it has memory of its own.
        device: Where the data is, or will be.
        flat: The same without an offset.
    """

    __slots__ = ("device", "dtype", "flat", "offset", "shape", "stride")

    def __init__(
        self, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], offset: int, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.stride = stride
        self.offset = offset
        self.device = device
        self.flat: LazySpec = self if not offset else spec(dtype, shape, stride, 0, device)

    def __repr__(self) -> str:
        """As messages show it, e.g. float32[2, 3]."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def empty(self) -> torch.Tensor:
        """Return memory for such a value."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def fits(self, data: torch.Tensor) -> bool:
        """Return whether data is of this kind, wherever in its memory it begins."""
        return data.dtype is self.dtype and data.shape == self.shape and data.stride() == self.stride


_specs: dict[tuple[Any, ...], LazySpec] = {}


def spec(
    dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int, device: torch.device
) -> LazySpec:
    """Return the kind of a value."""
    key = (dtype, shape, stride, offset, device)
    found = _specs.get(key)
    if found is None:
        size, steps = torch.Size(shape), tuple(stride)
        made = LazySpec(dtype, size, steps, offset, device)
        found = _specs.setdefault((dtype, size, steps, offset, device), made)
    return found


def spec_of(tensor: torch.Tensor) -> LazySpec:
    """Return the kind of a tensor, real or fake."""
    return spec(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.device)


@dataclass(frozen=True)
class TensorPlace:
    """Stands for a tensor among the arguments of an operation: the n-th value that it reads."""

    index: int


@dataclass(frozen=True)
class NumberPlace:
    """Stands for a number among the arguments of an operation: the n-th that is no part of its kind."""

    index: int


class LazyOperation:
    """One kind of call: an operation, the kinds of the tensors it reads, and all arguments but its numbers.

    Attributes:
        number: Unique in this process.
        target: What is called.
        args: Its arguments by position, tensors and numbers replaced by places.
        kwargs: And by keyword.
        results: The kinds of its results in order; None for one that is None.
        is_list: Whether they are returned as a list.
        is_tuple: Whether they are returned as a tuple.
        operands: For each number whether it is one that is computed with, and no setting such as an epsilon.
        calls: How often it was recorded.
    """

    __slots__ = ("args", "calls", "is_list", "is_tuple", "kwargs", "number", "operands", "results", "target")

    def __init__(
        self,
        target: OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        results: tuple[LazySpec | None, ...],
        *,
        is_list: bool,
        is_tuple: bool,
        operands: tuple[bool, ...] = (),
    ) -> None:
        self.number = next(_numbers)
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.results = results
        self.is_list = is_list
        self.is_tuple = is_tuple
        self.operands = operands
        self.calls = 0

    def arguments(
        self, tensor: Callable[[int], Any], number: Callable[[int], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call.

        Args:
            tensor: Returns what stands for the n-th value.
            number: Returns what stands for the n-th number.
        """
        return filled(self.args, self.kwargs, tensor, number)


def filled(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Callable[[int], Any], number: Callable[[int], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with something for their places.

    Args:
        args: By position.
        kwargs: By keyword.
        tensor: Returns what stands for the n-th value.
        number: Returns what stands for the n-th number.
    """

    def put(value: Any) -> Any:
        if type(value) is TensorPlace:
            return tensor(value.index)
        if type(value) is NumberPlace:
            return number(value.index)
        if type(value) in (list, tuple):
            return type(value)(map(put, value))
        return value

    return put(args), {name: put(value) for name, value in kwargs.items()}


class LazyCall:
    """One call that was recorded and has not run.

    Attributes:
        operation: Of which kind.
        reads: The values it reads.
        numbers: Those among its arguments that are no part of its kind.
        number: Of the call, in the order of recording.
        code: Of the user, that called; None where there is none.
        lasti: Index of the instruction in it.
    """

    __slots__ = ("code", "lasti", "number", "numbers", "operation", "reads")

    def __init__(
        self,
        operation: LazyOperation,
        reads: tuple[LazyValue, ...],
        numbers: tuple[float, ...],
        code: CodeType | None,
        lasti: int,
    ) -> None:
        self.operation = operation
        self.reads = reads
        self.numbers = numbers
        self.number = next(_numbers)
        self.code = code
        self.lasti = lasti


class LazyValue:
    """A tensor that never changes: pending, or with its data.

    Attributes:
        spec: Of which kind.
        call: What makes it; None once there is data.
        index: Which result of the call it is.
        data: None while it is pending.
        dynamic: Dimensions of data that are marked as changing from step to step.
        site: Name of the output that it is where it is observed; "" elsewhere.
    """

    __slots__ = ("call", "data", "dynamic", "index", "site", "spec")

    def __init__(
        self, spec: LazySpec, call: LazyCall | None = None, index: int = 0, data: torch.Tensor | None = None
    ) -> None:
        self.spec = spec
        self.call = call
        self.index = index
        self.data = data
        self.dynamic: frozenset[int] = frozenset()
        self.site = ""


class LazyMemory:
    """Memory that tensors share: its value now, and how often it was written.

    Attributes:
        value: What it holds.
        version: Raised by each write.
    """

    __slots__ = ("__weakref__", "value", "version")

    def __init__(self, value: LazyValue) -> None:
        global _created
        self.value = value
        self.version = 0
        _created += 1
        if value.data is None:
            _pending[id(self)] = weakref.ref(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Count it, as PyTorch/XLA does, and forget it; not at the end of the process, where this module is gone."""
        global _destroyed
        if is_finalizing():
            return
        _destroyed += 1
        _pending.pop(id(self), None)

    @property
    def spec(self) -> LazySpec:
        """Of what it holds."""
        return self.value.spec

    def get(self) -> LazyValue:
        """Return what it holds."""
        return self.value

    def set(self, value: LazyValue) -> None:
        """Write all of it."""
        self.value = value
        self.version += 1
        if value.data is None:
            _pending[id(self)] = weakref.ref(self)


_pending: dict[int, weakref.ref[LazyMemory]] = {}
_created = 0
_destroyed = 0


def pending_memories() -> list[LazyMemory]:
    """Return the memories that a tensor can still read and that have no data yet, in the order they were written."""
    found = []
    for number, reference in list(_pending.items()):
        memory = reference()
        if memory is not None and memory.value.data is None:
            found.append(memory)
        else:
            _pending.pop(number, None)
    return sorted(found, key=lambda memory: (memory.value.call.number, memory.value.index))  # type: ignore[union-attr]


def counts() -> Mapping[str, int]:
    """Return how many tensors with memory of their own were made, and how many are gone."""
    return {"CreateTensor": _created, "DestroyTensor": _destroyed}
