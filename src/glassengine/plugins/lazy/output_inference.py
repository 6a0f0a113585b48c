"""Infers what a call returns without computing it: once for each kind of call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from glassengine.frontends.eager_graph import silent
from glassengine.plugins.lazy.values import NUMBER_DTYPES, LazyCall, LazyOperation, LazySpec, spec_of

_lock = threading.RLock()
"""Of the mode, in which tensors change their device while an operation runs: threads wait for each other."""


class NotRecordableError(Exception):
    """What a call returns depends on values, or is nothing that a graph can hold, or the arguments do not fit."""


def infer_outputs(
    target: OpOverload,
    kinds: Sequence[LazySpec],
    numbers: Sequence[float],
    template: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> LazyOperation:
    """Return the kind of a call.

    Args:
        target: What is called.
        kinds: Of the tensors it reads.
        numbers: Those among its arguments; results are of one kind for all numbers of the same types.
        template: Its arguments with places for both.

    Raises:
        NotRecordableError: There is none.
    """
    args, kwargs = template
    operation = LazyOperation(target, args, kwargs, (), is_list=False, is_tuple=False)
    try:
        with _lock, silent(), _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad(), _mode():
            fakes = [_fake(kind) for kind in kinds]
            outcome = target(*(made := operation.arguments(fakes.__getitem__, numbers.__getitem__))[0], **made[1])
            several = isinstance(outcome, (list, tuple))
            results = tuple(map(_kind, outcome if several else (outcome,)))
    except NotRecordableError:
        raise
    except Exception as error:
        raise NotRecordableError(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
    operation.results = results
    operation.is_list = isinstance(outcome, list)
    operation.is_tuple = isinstance(outcome, tuple)
    return operation


def takes_any_number(call: LazyCall, decompositions: Mapping[Any, Callable[..., Any]]) -> bool:
    """Return whether a call can be decomposed without knowing its numbers."""
    operation = call.operation

    def compute(*given: torch.Tensor) -> Any:
        tensors, numbers = given[: len(call.reads)], given[len(call.reads) :]
        items = [torch.ops.aten._local_scalar_dense.default(number) for number in numbers]
        args, kwargs = operation.arguments(tensors.__getitem__, items.__getitem__)
        return operation.target(*args, **kwargs)

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with _disable_current_modes(), torch.no_grad():
        tensors = [value.spec.flat.empty() for value in call.reads]
        tensors += [torch.tensor(number, dtype=NUMBER_DTYPES[type(number)]) for number in call.numbers]
        try:
            with silent(), mode:
                fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
                make_fx(compute, dict(decompositions))(*fakes)
        except Exception:  # whatever it is, the number is a constant then, which is always right
            return False
    return True


def _kind(result: Any) -> LazySpec | None:
    if result is None:
        return None
    if not isinstance(result, torch.Tensor):
        raise NotRecordableError("its result is a plain value")
    if result.layout is not torch.strided or result.is_quantized or result.is_conj() or result.is_neg():
        raise NotRecordableError("its result is no plain tensor")
    if result.is_meta:
        raise NotRecordableError("its result has no values")
    return spec_of(result)


@functools.cache
def _mode() -> FakeTensorMode:
    return FakeTensorMode()


@functools.lru_cache(1024)
def _fake(kind: LazySpec) -> torch.Tensor:
    """Return a tensor of a kind without data; called within the mode."""
    if not kind.offset:
        return kind.empty()
    size = kind.offset + 1 + sum((size - 1) * step for size, step in zip(kind.shape, kind.stride, strict=True))
    memory = torch.empty(max(size, 0), dtype=kind.dtype, device=kind.device)
    return memory.as_strided(kind.shape, kind.stride, kind.offset)
