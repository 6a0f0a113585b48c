"""Quantizes matrices to Q4_K, which the package gguf reads but does not write.

A block of 256 numbers has eight parts of 32. Each part has a scale and a minimum in 6 bits, the block one of each in
float16; a number is four bits: d * scale * q - dmin * minimum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_BLOCK, _PARTS, _LEVELS, _MOST = 256, 8, 15, 63
Array = np.ndarray[Any, Any]


def q4_k(values: Array) -> Array:
    """Return the bytes [..., width / 256 * 144] of a matrix whose rows are whole blocks of 256."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, _PARTS, _BLOCK // _PARTS)
    made = np.concatenate([_blocks(flat[at : at + 8192]) for at in range(0, len(flat), 8192)])
    return made.reshape(*values.shape[:-1], -1)


def _blocks(x: Array) -> Array:
    low = np.minimum(x.min(-1), 0.0)
    scales, minima = (x.max(-1) - low) / _LEVELS, -low
    d, whole_scales = _shared(scales)
    dmin, whole_minima = _shared(minima)
    step = d[:, None] * whole_scales
    offset = (dmin[:, None] * whole_minima)[..., None]
    inverse = np.divide(1.0, step, out=np.zeros_like(step), where=step > 0)
    numbers = np.clip(np.rint((x + offset) * inverse[..., None]), 0, _LEVELS).astype(np.uint8)
    pairs = numbers.reshape(len(x), _PARTS // 2, 2, -1)
    halves = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(x), -1)
    ends = np.stack([d, dmin], -1).astype(np.float16).view(np.uint8).reshape(len(x), -1)
    return np.concatenate([ends, _packed(whole_scales.astype(np.uint8), whole_minima.astype(np.uint8)), halves], -1)


def _shared(parts: Array) -> tuple[Array, Array]:
    """Return the scale that the parts of a block share, as float16 has it, and the parts in whole steps of it."""
    shared = (parts.max(-1) / _MOST).astype(np.float16).astype(np.float32)
    inverse = np.divide(1.0, shared, out=np.zeros_like(shared), where=shared > 0)
    return shared, np.clip(np.rint(parts * inverse[:, None]), 0, _MOST).astype(np.float32)


def _packed(scales: Array, minima: Array) -> Array:
    """Return eight scales and eight minima of six bits as twelve bytes."""
    first, last = slice(0, _PARTS // 2), slice(_PARTS // 2, _PARTS)
    return np.concatenate(
        [
            scales[:, first] | scales[:, last] >> 4 << 6,
            minima[:, first] | minima[:, last] >> 4 << 6,
            scales[:, last] & 15 | (minima[:, last] & 15) << 4,
        ],
        -1,
    )
