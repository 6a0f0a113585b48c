"""Chooses the arithmetic for pieces of two tensors: plain, or compiled from a million elements on."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from glassengine.blocks.arithmetic import FLOAT32, FLOAT64, ROW, Arithmetic, Array

_IN_FLOAT32 = {np.dtype(name) for name in ("float32", "float16", "int8", "uint8", "int16", "uint16", "bool")}
_IN_FLOAT64 = _IN_FLOAT32 | {np.dtype(name) for name in ("float64", "int32", "uint32", "int64", "uint64")}

# Float32 tolerances outside would not be representable.
_LARGEST_TOLERANCE = 1e30

# Elements for which a thread keeps scratch space, up to 40 bytes for each: new memory costs as much as a pass over it.
_MOST_KEPT = 1 << 18
_known = threading.local()

COMPILED_FROM = 1 << 20
"""Elements of a tensor for which loading the compiled pass is worth its time."""


def arithmetic_for(
    dtypes: set[np.dtype[Any]], num_elements: int, piece: int, rtol: float, atol: float
) -> tuple[Arithmetic, ...]:
    """Return what may add up pieces of two tensors, fastest first; nothing for complex numbers or odd tolerances.

    Args:
        dtypes: Of both sides.
        num_elements: Of a tensor.
        piece: Elements of a piece of the plain path.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
    """
    if not (0 <= rtol < _LARGEST_TOLERANCE and 0 <= atol < _LARGEST_TOLERANCE):
        return ()
    kind = compiled_kind() if num_elements >= COMPILED_FROM else Arithmetic
    size = min(num_elements, piece * kind.pieces)
    # A tensor of less than a row gains nothing from float32.
    if dtypes <= _IN_FLOAT32 and num_elements >= ROW:
        return _made(kind, FLOAT32, size, rtol, atol), _made(kind, FLOAT64, size, rtol, atol)
    return (_made(kind, FLOAT64, size, rtol, atol),) if dtypes <= _IN_FLOAT64 else ()


@functools.cache
def compiled_kind() -> type[Arithmetic]:
    """Return the compiled kind where numba is installed, else the plain one."""
    try:
        from glassengine.blocks.compiled import CompiledArithmetic
    except (ImportError, RuntimeError):  # not installed, or no directory takes what it compiles
        return Arithmetic
    return CompiledArithmetic


@functools.cache
def compiled_squares() -> Callable[[Array, Array, Array, Array], None] | None:
    """Return `compiled.add_squares` where numba is installed."""
    if compiled_kind() is Arithmetic:
        return None
    from glassengine.blocks.compiled import add_squares

    return add_squares


def _made(kind: type[Arithmetic], dtype: np.dtype[Any], size: int, rtol: float, atol: float) -> Arithmetic:
    """Return scratch space, which the same thread uses again."""
    known: dict[tuple[Any, ...], Arithmetic] = vars(_known).setdefault("arithmetic", {})
    key = kind, dtype, -(-size // ROW), rtol, atol
    if key not in known:
        if size + sum(one.capacity for one in known.values()) > _MOST_KEPT:
            known.clear()
        known[key] = kind(dtype, size, rtol, atol)
    return known[key]
