"""Dispatches each operation on a lazy tensor when it is called; ATen computes those that cannot be recorded.

Random numbers are drawn when the user's code draws them, from torch's own generator, and are inputs of the graph: the
same seed gives the numbers that code without lazy tensors gets, on every back-end and wherever a graph begins.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from glassengine.executable.counters import registry
from glassengine.frontends.eager_graph import argument
from glassengine.plugins.lazy.graphs import Awaited
from glassengine.plugins.lazy.memory import MemoryView
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
from glassengine.plugins.lazy.rules import CallKind, CallRule, NotRecordableError, rule_of
from glassengine.plugins.lazy.running import fetch, run_pending, user_line
from glassengine.plugins.lazy.settings import Reason, settings
from glassengine.plugins.lazy.tensor import DEVICE, LazyTensor
from glassengine.plugins.lazy.values import LazyMemory, LazySpec, LazyValue
from glassengine.results.backends import Fallback

logger = logging.getLogger("glassengine.lazy")

_fallbacks: Counter[tuple[str, str, str]] = Counter()
_FIRST_ALONE = (torch.ops.aten._pack_padded_sequence.default,)
"""Only the first result is on the device of the arguments: lengths of sequences are always on the host."""


def computed(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> Any:
    """Return what ATen computes at once, after the graphs of the arguments have run."""
    tensors: dict[int, LazyTensor] = {}
    tree_map(lambda value: tensors.setdefault(id(value), value) if type(value) is LazyTensor else None, (args, kwargs))
    fetched = fetch([tensor._lazy.get() for tensor in tensors.values()], Reason("fallback", str(target)))
    writes = not isinstance(target, OpOverload) or target._schema.is_mutable
    real: dict[int, torch.Tensor] = {}
    # A recurrent layer keeps what its backward needs only where gradients are wanted.
    gradients = torch.is_grad_enabled() and target is torch.ops.aten.mkldnn_rnn_layer.default
    with _disable_current_modes(), torch.set_grad_enabled(gradients):
        for (key, tensor), data in zip(tensors.items(), fetched, strict=True):
            kind = tensor._lazy.spec
            own = kind.empty().copy_(data) if writes and not _overlaps(kind) else data
            real[key] = own.clone() if writes and own is data else own

        def put(value: Any) -> Any:
            if type(value) is LazyTensor:
                return real[id(value)]
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == DEVICE.type else value

        given, options = tree_map(put, (tuple(args), dict(kwargs)))
        outcome = target(*given, **options)
    _note(target, reason)
    origins = {id(data): tensors[key] for key, data in real.items()}
    for tensor in _written(target, args, kwargs):
        _write_back(tensor, real[id(tensor)])

    def taken(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        if id(result) in origins:
            return origins[id(result)]
        if type(result) is not torch.Tensor or result.layout is not torch.strided or result.is_quantized:
            return result
        return lazy_tensor(held(result.resolve_conj().resolve_neg().clone()))

    if target in _FIRST_ALONE:
        return (taken(outcome[0]), *outcome[1:])
    return tree_map(taken, outcome)


def _written(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[LazyTensor]:
    """Return the lazy tensors that a call writes to."""
    if not isinstance(target, OpOverload):
        return []
    found: list[Any] = []
    for place, described in enumerate(target._schema.arguments):
        if described.alias_info is not None and described.alias_info.is_write:
            value = argument((described.name, place), args, kwargs)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if type(value) is LazyTensor]


def _overlaps(kind: LazySpec) -> bool:
    return any(not step and size > 1 for step, size in zip(kind.stride, kind.shape, strict=True))


def _write_back(tensor: LazyTensor, data: torch.Tensor) -> None:
    """Let a lazy tensor hold what ATen has written to its copy."""
    if data.shape != tensor.shape and not tensor.numel():
        made = lazy_tensor(held(data.detach().clone()))
        with no_dispatch():
            torch.Tensor.data.__set__(tensor, made)  # type: ignore[attr-defined]
        tensor._lazy = made._lazy
        return
    if data.shape != tensor.shape:
        raise RuntimeError(
            f"a lazy tensor cannot be given another shape: it was {list(tensor.shape)}, and {list(data.shape)} was"
            " asked for; make a new one"
        )
    handle = tensor._lazy
    value = fitted(held(data.detach().clone()), handle.spec)
    try:
        write(handle, value)
    except NotRecordableError:
        # The memory is computed and written with the views of ATen itself.
        assert isinstance(handle, MemoryView)
        memory = fetch([handle.memory.get()], Reason("fallback", "a write to a view"))[0].clone()
        part: Any = memory
        for view in handle.chain():
            args, kwargs = view.operation.arguments([part].__getitem__, lambda _: None)
            made = view.operation.target(*args, **kwargs)
            part = made[view.index] if isinstance(made, (list, tuple)) else made
        part.copy_(data)
        handle.memory.set(held(memory))


def _note(target: Any, reason: str) -> None:
    """Count an operation that ATen computes at once, by the name that PyTorch/XLA gives it, with the user's line."""
    packet = getattr(target, "_overloadpacket", target)
    name = str(packet).replace(".", "::", 1)
    registry.count(name)
    key = (name, reason, user_line())
    registry.count(f"Fallback::{name} at {key[2]}")
    _fallbacks[key] += 1
    if _fallbacks[key] == 1:
        logger.info("%s runs on ATen: %s, at %s", *key)


def fallbacks() -> tuple[Fallback, ...]:
    """Return what was not recorded, the most frequent first."""
    return tuple(Fallback(*key, count) for key, count in _fallbacks.most_common())


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
    CallKind.NUMBER: lambda rule, args, kwargs: fetch([args[0]._lazy.get()], Reason("read", "item()"))[0].item(),
    CallKind.ATEN: lambda rule, args, kwargs: computed(rule.target, args, kwargs, rule.reason),
}
