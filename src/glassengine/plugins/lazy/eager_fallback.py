"""Eager fallback for operations that cannot be recorded: ATen computes them after the graphs of their arguments."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from glassengine.executable.metrics.metrics import registry
from glassengine.frontends.eager_graph import argument
from glassengine.plugins.lazy.memory import MemoryView
from glassengine.plugins.lazy.output_inference import NotRecordableError
from glassengine.plugins.lazy.recording import fitted, held, lazy_tensor, write
from glassengine.plugins.lazy.running import fetch
from glassengine.plugins.lazy.settings import Reason
from glassengine.plugins.lazy.tensor import DEVICE, LazyTensor
from glassengine.plugins.lazy.user_code import user_line
from glassengine.plugins.lazy.values import LazySpec
from glassengine.results.lazy import Fallback

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
