"""Takes the operations on lazy tensors and records them.

A call is looked up by its operation, the kinds of its tensors and its other arguments: what it returns is foreseen once
for each. Nothing that is recorded writes: an operation that does is recorded as the one that returns what it would have
written. So a graph can be run for one tensor now and for the others later, and no order of reading changes a value.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from glassengine.executable.counters import registry
from glassengine.frontends.eager_graph import is_input_number
from glassengine.plugins.lazy.memory import Handle, MemoryView, order_of, with_part
from glassengine.plugins.lazy.rules import CallRule, NotRecordableError, infer_outputs, rule_of
from glassengine.plugins.lazy.tensor import DEVICE, LazyTensor
from glassengine.plugins.lazy.values import (
    LazyCall,
    LazyMemory,
    LazyOperation,
    LazySpec,
    LazyValue,
    NumberPlace,
    TensorPlace,
    spec_of,
)

aten = torch.ops.aten

PLAIN = (torch.Tensor, torch.nn.Parameter)
_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<frozen", "<string>")
_operations: dict[tuple[Any, ...], LazyOperation] = {}
_is_users: dict[int, tuple[CodeType, bool]] = {}


def _place(depth: int) -> tuple[CodeType | None, int]:
    """Return the innermost code outside of torch and of this package, and where in it.

    Args:
        depth: How many of the innermost frames are known to be of this package.
    """
    frame = sys._getframe(depth)
    while True:
        code = frame.f_code
        known = _is_users.get(id(code))  # by identity: the hash of code is computed anew each time
        if known is None:
            known = _is_users[id(code)] = (code, not code.co_filename.startswith(_NOT_USERS))
        if known[1]:
            return code, frame.f_lasti
        if frame.f_back is None:
            return None, 0
        frame = frame.f_back


Taken = tuple[list[Any], list[LazyValue], list[float]]
"""Of the arguments of a call: the operation, the kinds of tensors and all that is no number; values; numbers."""


def taken_apart(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any], of_view: bool = False) -> Taken:
    """Take the arguments of a call apart.

    Args:
        rule: Of the operation.
        args: By position.
        kwargs: By keyword.
        of_view: Whether where a tensor begins in its memory is a part of its kind.
    """
    key: list[Any] = [rule.target]
    reads: list[LazyValue] = []
    taken: Taken = (key, reads, [])
    numeric = rule.numeric
    for place, value in enumerate(args):
        if type(value) is LazyTensor:
            held = value._lazy.get()
            reads.append(held)
            key.append(held.spec if of_view else held.spec.flat)
        else:
            _take(taken, value, place in numeric)
    for name, value in kwargs.items():
        key.append(name)
        _take(taken, value, name in numeric)
    return taken


def _take(taken: Taken, value: Any, is_numeric: bool) -> None:
    key, reads, numbers = taken
    kind = type(value)
    if kind is LazyTensor or kind is LazyValue:
        held = value._lazy.get() if kind is LazyTensor else value
        reads.append(held)
        key.append(held.spec.flat)
    elif kind is float or (kind is int and is_numeric):
        # A number too large for a tensor is a part of the key.
        if is_numeric and is_input_number(value):
            numbers.append(value)
            key.append(kind)
        else:
            key.append((kind, repr(value)))
    elif kind is list or kind is tuple:
        key.append(len(value))
        for item in value:
            _take(taken, item, is_numeric)
    elif isinstance(value, torch.Tensor):
        if kind not in PLAIN or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise NotRecordableError(f"a {kind.__name__} that is no plain tensor is among its arguments")
        reads.append(held := brought_in(value))
        key.append(held.spec)
    elif kind is torch.device:
        key.append(None if value.type == DEVICE.type else value)
    elif isinstance(value, torch.Generator):
        raise NotRecordableError("it is given a generator")
    else:
        key.append((bool, value) if kind is bool else value)


def _template(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with places for tensors and numbers, in the order in which `Arguments` takes them."""
    tensors = numbers = 0

    def put(value: Any, is_numeric: bool) -> Any:
        nonlocal tensors, numbers
        kind = type(value)
        if isinstance(value, torch.Tensor) or kind is LazyValue:
            tensors += 1
            return TensorPlace(tensors - 1)
        if is_numeric and is_input_number(value):
            numbers += 1
            return NumberPlace(numbers - 1)
        if kind in (list, tuple):
            return [put(item, is_numeric) for item in value]
        if kind is torch.device and value.type == DEVICE.type:
            return None
        return value

    numeric = rule.numeric
    placed = tuple(put(value, place in numeric) for place, value in enumerate(args))
    return placed, {name: put(value, name in numeric) for name, value in kwargs.items()}


def _operands(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each number of a call whether it is computed with, as the float that a tensor is multiplied by."""
    types = {argument.name: str(argument.type) for argument in rule.target._schema.arguments}
    names = list(types)
    found: list[bool] = []

    def add(value: Any, name: str) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                add(item, name)
        elif type(value) in (float, int):
            found.append(type(value) is float and "float" not in types[name])

    numeric = rule.numeric
    for place, value in enumerate(args):
        if place in numeric:
            add(value, names[place])
    for name, value in kwargs.items():
        if name in numeric:
            add(value, name)
    return tuple(found)


def brought_in(tensor: torch.Tensor) -> LazyValue:
    """Return the value of a tensor like any other: a copy, since its owner may write to it."""
    start = time.perf_counter_ns()
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        data = tensor.detach().clone()
    registry.sample("TransferToDeviceTime", time.perf_counter_ns() - start, "ns")
    value = held(data)
    marked = getattr(tensor, "_dynamo_dynamic_indices", None)
    if marked:
        value.dynamic = frozenset(marked)
    return value


def held(data: torch.Tensor) -> LazyValue:
    """Return the value of data that nothing else writes to."""
    if data.storage_offset() or not torch.ops.aten.is_non_overlapping_and_dense.default(data):
        data = data.contiguous().clone()
    return LazyValue(spec_of(data), data=data)


def lazy_tensor(value: LazyValue) -> LazyTensor:
    """Return a tensor with memory of its own that holds a value."""
    return LazyTensor.made(LazyMemory(value))


def recorded(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[LazyValue | None]:
    """Record a call, and return the values that it makes.

    Raises:
        NotRecordableError: It cannot be recorded.
    """
    rule = rule_of(target)
    return outcome(*record(rule, args, kwargs, taken_apart(rule, args, kwargs)))


def record(
    rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any], taken: Taken
) -> tuple[LazyOperation, LazyCall]:
    """Record a call whose arguments were taken apart.

    Raises:
        NotRecordableError: It cannot be recorded.
    """
    key = tuple(taken[0])
    try:
        operation = _operations.get(key)
    except TypeError as error:  # an argument without a hash
        raise NotRecordableError("an argument of it is of no kind that a graph can hold") from error
    if operation is None:
        kinds = [part for part in key if type(part) is LazySpec]
        operation = infer_outputs(rule.target, kinds, taken[2], _template(rule, args, kwargs))
        operation.operands = _operands(rule, args, kwargs)
        _operations[key] = operation
    operation.calls += 1
    code, lasti = _place(4)
    return operation, LazyCall(operation, tuple(taken[1]), tuple(taken[2]), code, lasti)


def outcome(operation: LazyOperation, call: LazyCall) -> list[LazyValue | None]:
    """Return the values that a call makes."""
    return [None if kind is None else LazyValue(kind, call, index) for index, kind in enumerate(operation.results)]


def apply(target: OpOverload, *args: Any) -> LazyValue:
    """Record a call with values in place of tensors, and return its only result."""
    (value,) = recorded(target, args, {})
    assert value is not None
    return value


def fitted(value: LazyValue | None, kind: LazySpec) -> LazyValue:
    """Return a value as memory of a kind holds it once it is written there.

    Raises:
        NotRecordableError: It does not fit there.
    """
    if value is None or value.spec.shape != kind.shape:
        raise NotRecordableError("the result has another shape than what it is written to")
    if value.spec.dtype is not kind.dtype:
        (value,) = recorded(aten._to_copy.default, (value,), {"dtype": kind.dtype})
        assert value is not None
    if value.spec.stride == kind.stride:
        return value
    order = order_of(kind.stride, kind.shape)
    value = apply(aten.permute.default, value, order)
    (value,) = recorded(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
    assert value is not None
    return apply(aten.permute.default, value, [order.index(dim) for dim in range(len(order))])


def write(handle: Handle, value: LazyValue) -> None:
    """Let memory, or the part of it that a view is, hold a value of its kind.

    Raises:
        NotRecordableError: There is no operation that puts such a part into its memory.
    """
    while isinstance(handle, MemoryView):
        whole = with_part(handle, value, apply)
        if whole is None:
            raise NotRecordableError("it writes to a view that is not followed")
        handle = handle.parent
        if whole.spec is not handle.spec.flat:
            whole = fitted(whole, handle.spec)
        value = whole
    handle.set(value)


def _recorded_ops() -> Mapping[str, int]:
    """Return how often each operation was recorded, as PyTorch/XLA counts `xla::<op>`."""
    counts: Counter[str] = Counter()
    for operation in list(_operations.values()):
        counts[f"lazy::{operation.target._schema.name.partition('::')[2]}"] += operation.calls
    return counts


registry.add_source(_recorded_ops)
