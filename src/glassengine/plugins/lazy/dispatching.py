"""Dispatches each operation on a lazy tensor when it is called.

Random numbers are drawn when the user's code draws them, from torch's own generator, and are inputs of the graph: the
same seed gives the numbers that code without lazy tensors gets, on every back-end and wherever a graph begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from glassengine.frontends.eager_graph import argument
from glassengine.plugins.lazy.eager_fallback import computed
from glassengine.plugins.lazy.memory import MemoryView
from glassengine.plugins.lazy.observed import Awaited
from glassengine.plugins.lazy.output_inference import NotRecordableError
from glassengine.plugins.lazy.recording import (
    PLAIN,
    apply,
    brought_in,
    fitted,
    held,
    lazy_tensor,
    record,
    recorded,
    taken_apart,
    write,
)  # fmt: skip
from glassengine.plugins.lazy.rules import CallKind, CallRule, rule_of
from glassengine.plugins.lazy.running import fetch, run_pending
from glassengine.plugins.lazy.settings import Reason, settings
from glassengine.plugins.lazy.tensor import DEVICE, LazyTensor
from glassengine.plugins.lazy.values import LazyMemory, LazyValue

aten = torch.ops.aten
_SAME = (aten.alias.default, aten.detach.default, aten.lift_fresh.default)
_MASKS = (torch.bool, torch.uint8)


class DispatchRecorder:
    """Records what lazy tensors are used for."""

    def dispatch(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation; see `CallKind`."""
        known = _handlers.get(target)
        if known is None:
            if not isinstance(target, OpOverload):
                return computed(target, args, kwargs, "it is no single operation")
            rule = rule_of(target)
            known = _handlers[target] = (_BY_KIND[rule.kind], rule)
        handler, rule = known
        try:
            made = handler(rule, args, kwargs)
        except NotRecordableError as error:
            made = computed(target, args, kwargs, str(error))
        if settings.each_op:
            lazy = [value for value in tree_leaves(made) if type(value) is LazyTensor]
            fetch([value._lazy.get() for value in lazy], Reason("debug", "eager debug mode"))
        return made

    def data(self, tensor: LazyTensor, why: str) -> torch.Tensor:
        """Return the data of a tensor."""
        return fetch([tensor._lazy.get()], Reason("read", why))[0]

    def promised(self, tensor: LazyTensor, site: str, on_run: Callable[[], None]) -> Awaited:
        """Return what has the data of a tensor, as it is now, as soon as a graph has made it."""
        return Awaited(tensor._lazy.get(), site, on_run)

    def keep_promises(self, why: str) -> None:
        """Run everything that is pending."""
        run_pending(Reason("read", why))


def _compute(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if rule.indices is not None or rule.dropout is not None:
        _require_static(rule, args, kwargs)
    if rule.target is aten.histc.default and type(args[0]) is LazyTensor and not args[0].is_floating_point():
        # Code that asks for the device takes this for one that counts integers, as accelerators do.
        counts = aten.histc.default(aten._to_copy.default(args[0], dtype=torch.float64), *args[1:], **kwargs)
        return aten._to_copy.default(counts, dtype=args[0].dtype)
    operation, call = record(rule, args, kwargs, taken_apart(rule, args, kwargs))
    results = operation.results
    if not operation.is_list and not operation.is_tuple:
        return LazyTensor.made(LazyMemory(LazyValue(results[0], call)))  # type: ignore[arg-type]
    made = [
        None if kind is None else LazyTensor.made(LazyMemory(LazyValue(kind, call, index)))
        for index, kind in enumerate(results)
    ]
    return made if operation.is_list else tuple(made)


def _require_static(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if rule.dropout is not None and argument(rule.dropout, args, kwargs):
        raise NotRecordableError("what it draws depends on values")
    if rule.indices is not None:
        for index in argument(rule.indices, args, kwargs) or ():
            if isinstance(index, torch.Tensor) and index.dtype in _MASKS:
                raise NotRecordableError("the shape of its result depends on values")


def _view(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensor = args[0]
    if type(tensor) is not LazyTensor:
        raise NotRecordableError("it is a view of a tensor that is not lazy")
    target, parent = rule.target, tensor._lazy
    if target in _SAME:
        return LazyTensor.made(parent)
    if target is aten.as_strided.default:
        # Its sizes and steps are those of the memory, whatever view it is called on.
        parent = parent.memory if isinstance(parent, MemoryView) else parent
        if len(args) < 4 or args[3] is None:
            args = (*args[:3], tensor._lazy.spec.offset)
            kwargs = {}
        if parent.spec.dtype is not tensor.dtype:
            raise NotRecordableError("the memory is of another dtype")
        tensor = LazyTensor.made(parent)
        args = (tensor, *args[1:])
    operation, call = record(rule, args, kwargs, taken_apart(rule, args, kwargs, of_view=True))
    made = [
        LazyTensor.made(MemoryView(parent, operation, index, LazyValue(kind, call, index)))
        for index, kind in enumerate(operation.results)
        if kind is not None
    ]
    if operation.is_list:
        return made
    return tuple(made) if operation.is_tuple else made[0]


def _reshape(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record an operation that gives its argument another shape in place, as `squeeze_`."""
    assert rule.twin is not None
    tensor = args[0]
    made = _view(rule_of(rule.twin), args, kwargs)
    with no_dispatch():
        rule.target(*args, **kwargs)  # of sizes and strides alone: there is no data
    tensor._lazy = made._lazy
    return tensor


def _write(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    assert rule.twin is not None and rule.written is not None
    name, place = rule.written
    written = argument(rule.written, args, kwargs)
    targets: list[Any] = list(written) if isinstance(written, (list, tuple)) else [written]
    if not all(type(tensor) is LazyTensor for tensor in targets):
        raise NotRecordableError("it writes to a tensor that is not lazy")
    if place >= len(args):
        kwargs = {key: value for key, value in kwargs.items() if key != name}
    values = recorded(rule.twin, args, kwargs)
    for value, tensor in zip(values, targets, strict=True):
        if value is not None and not torch.can_cast(value.spec.dtype, tensor.dtype):
            raise NotRecordableError("the result has another dtype than what it is written to")
    fitting = [fitted(value, tensor._lazy.spec) for value, tensor in zip(values, targets, strict=True)]
    for tensor, value in zip(targets, fitting, strict=True):
        write(tensor._lazy, value)
    return None if not rule.target._schema.returns else written


def _copy(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensor, source = args[0], args[1]
    if type(tensor) is not LazyTensor:
        raise NotRecordableError("it writes to a tensor that is not lazy")
    kind = tensor._lazy.spec
    value: LazyValue | None = source._lazy.get() if type(source) is LazyTensor else None
    if value is None:
        value = brought_in(source) if type(source) in PLAIN and source.layout is torch.strided else None
    if value is None:
        raise NotRecordableError("it copies what is no plain tensor")
    if value.spec.shape != kind.shape:
        value = apply(aten.expand.default, value, list(kind.shape))
    write(tensor._lazy, fitted(value, kind))
    return tensor


def _draw(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    kind = args[0]._lazy.spec.flat if type(args[0]) is LazyTensor else None
    if kind is None or any(isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values())):
        raise NotRecordableError("what it draws depends on values")
    options = {
        name: None if isinstance(value, torch.device) and value.type == DEVICE.type else value
        for name, value in kwargs.items()
    }
    with _disable_current_modes(), torch.no_grad():
        drawn = rule.target(kind.empty(), *args[1:], **options)
    if not rule.target._schema.is_mutable:
        return lazy_tensor(held(drawn))
    write(args[0]._lazy, fitted(held(drawn), args[0]._lazy.spec))
    return args[0]


def _normalize(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record a batch normalization, which writes its statistics in training without its schema saying so."""
    mean, variance, training = args[3], args[4], args[5]
    if not training or mean is None:
        return _compute(rule, args, kwargs)
    if type(mean) is not LazyTensor or type(variance) is not LazyTensor:
        raise NotRecordableError("it writes to a tensor that is not lazy")
    twin = aten._native_batch_norm_legit_functional.default
    *values, new_mean, new_variance = recorded(twin, args, kwargs)
    write(mean._lazy, fitted(new_mean, mean._lazy.spec))
    write(variance._lazy, fitted(new_variance, variance._lazy.spec))
    return tuple(lazy_tensor(value) for value in values if value is not None)


def _number(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return fetch([args[0]._lazy.get()], Reason("read", "item()"))[0].item()


def _aten(rule: CallRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return computed(rule.target, args, kwargs, rule.reason)


Handler = Callable[[CallRule, Sequence[Any], Mapping[str, Any]], Any]
_handlers: dict[OpOverload, tuple[Handler, CallRule]] = {}
_BY_KIND: dict[CallKind, Handler] = {
    CallKind.COMPUTE: _compute,
    CallKind.RESHAPE: _reshape,
    CallKind.VIEW: _view,
    CallKind.WRITE: _write,
    CallKind.COPY: _copy,
    CallKind.DRAW: _draw,
    CallKind.NORMALIZE: _normalize,
    CallKind.NUMBER: _number,
    CallKind.ATEN: _aten,
}
