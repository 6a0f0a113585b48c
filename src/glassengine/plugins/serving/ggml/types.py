"""The types of ggml: blocks of numbers, and what a product rounds the activations to that it reads beside them.

Q4_K, which the package gguf reads but does not write, is written here. A block of 256 numbers has eight parts of 32.
Each part has a scale and a minimum in 6 bits, the block one of each in float16; a number is four bits:
d * scale * q - dmin * minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from glassengine.errors import UsageError
from glassengine.extensions import require_package


@dataclass(frozen=True)
class TensorType:
    """How numbers are stored.

    Attributes:
        number: ggml's own.
        name: Likewise.
        block: Numbers in a block.
        block_bytes: Bytes of it.
        group: Numbers that share a scale; 0 where there is none.
        levels: Steps between the least and the largest number of a group.
    """

    number: int
    name: str
    block: int = 1
    block_bytes: int = 4
    group: int = 0
    levels: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether numbers are integers with a scale."""
        return self.group > 0


_F32, _F16, _BF16, _F64 = 0, 1, 30, 28
TYPES = {
    one.number: one
    for one in (
        TensorType(_F32, "F32", 1, 4),
        TensorType(_F16, "F16", 1, 2),
        TensorType(2, "Q4_0", 32, 18, 32, 16),
        TensorType(3, "Q4_1", 32, 20, 32, 15),
        TensorType(6, "Q5_0", 32, 22, 32, 32),
        TensorType(7, "Q5_1", 32, 24, 32, 31),
        TensorType(8, "Q8_0", 32, 34, 32, 254),
        TensorType(10, "Q2_K", 256, 84, 16, 3),
        TensorType(11, "Q3_K", 256, 110, 16, 8),
        TensorType(12, "Q4_K", 256, 144, 32, 15),
        TensorType(13, "Q5_K", 256, 176, 32, 31),
        TensorType(14, "Q6_K", 256, 210, 16, 64),
        TensorType(16, "IQ2_XXS", 256, 66, 32, 4),
        TensorType(17, "IQ2_XS", 256, 74, 16, 4),
        TensorType(18, "IQ3_XXS", 256, 98, 32, 8),
        TensorType(19, "IQ1_S", 256, 50, 32, 2),
        TensorType(20, "IQ4_NL", 32, 18, 32, 12),
        TensorType(21, "IQ3_S", 256, 110, 32, 8),
        TensorType(22, "IQ2_S", 256, 82, 16, 4),
        TensorType(23, "IQ4_XS", 256, 136, 32, 12),
        TensorType(24, "I8", 1, 1),
        TensorType(25, "I16", 1, 2),
        TensorType(26, "I32", 1, 4),
        TensorType(27, "I64", 1, 8),
        TensorType(_F64, "F64", 1, 8),
        TensorType(29, "IQ1_M", 256, 56, 32, 2),
        TensorType(_BF16, "BF16", 1, 2),
        TensorType(34, "TQ1_0", 256, 54, 256, 2),
        TensorType(35, "TQ2_0", 256, 66, 256, 2),
        TensorType(39, "MXFP4", 32, 17, 32, 12),
    )
}
BY_NAME = {one.name: one for one in TYPES.values()}

READ_AS = {
    "F16": "F16",
    "BF16": "BF16",
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4"), "Q8_0"),
    **dict.fromkeys(("Q4_1", "Q5_1"), "Q8_1"),
    **dict.fromkeys(
        [
            "Q2_K",
            "Q3_K",
            "Q4_K",
            "Q5_K",
            "Q6_K",
            "IQ2_XXS",
            "IQ2_XS",
            "IQ2_S",
            "IQ3_XXS",
            "IQ3_S",
            "IQ1_S",
            "IQ1_M",
            "IQ4_XS",
            "TQ1_0",
            "TQ2_0",
        ],
        "Q8_K",
    ),
}
"""Type of a weight -> type that its product rounds the activations to; every other type reads them as they are."""

_PLAIN: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


def dequantized(data: np.ndarray[Any, Any], shape: tuple[int, ...], kind: TensorType) -> torch.Tensor:
    """Return the numbers of a tensor as float32, or as the integers that they are.

    Raises:
        UsageError: `gguf` does not know the type, or is not installed.
    """
    if kind.name in _PLAIN:
        plain = np.array(data.view(_PLAIN[kind.name]).reshape(shape))
        return torch.from_numpy(plain).float() if plain.dtype.kind == "f" else torch.from_numpy(plain)
    if kind.name == "BF16":
        return torch.from_numpy(np.array(data)).view(torch.bfloat16).reshape(shape).float()
    gguf = require_package("gguf", "GGUF files are read with the package gguf", "pip install 'glassengine[gguf]'")
    rows = data.reshape(*shape[:-1], shape[-1] // kind.block * kind.block_bytes)
    try:
        found = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind.number))
    except (NotImplementedError, ValueError) as error:
        raise UsageError(f"gguf does not dequantize {kind.name}", got=str(error)) from error
    return torch.from_numpy(np.ascontiguousarray(found, np.float32)).reshape(shape)


def step_of(values: torch.Tensor, kind: TensorType) -> torch.Tensor:
    """Return the step of each element of a dequantized tensor: what its group spans, over the number of levels.

    Types that are symmetric have their largest number at one end; of the others least and largest span the range. What
    is at an end of that may have been cut off, and has a negative step. MXFP4 has floating numbers: between 4 and 6
    scales they are 2 apart, and what is up to 8 becomes 6.
    """
    groups = values.reshape(-1, kind.group)
    least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    size = torch.maximum(-least, most)
    if kind.name == "MXFP4":
        scale = torch.where(size > 0, (size / 4).log2().floor().exp2(), 0.0)
        levels = (groups.abs() / scale.where(scale > 0, 1.0)).clamp(min=1.0)
        step = scale * levels.log2().floor().exp2() / 2
        return torch.where(levels >= _MOST_OF_MXFP4, -step, step).reshape(values.shape)
    is_even = kind.levels % 2 == 0
    span = 2 * size if is_even else most.clamp(min=0) - least.clamp(max=0)
    step = (span / kind.levels).expand(groups.shape)
    at_end = (groups >= most) | (groups <= least)
    return torch.where(at_end & (kind.levels > _FEW), -step, step).reshape(values.shape)


_MOST_OF_MXFP4 = 6
"""Scales."""
_FEW = 3
"""Levels of which most numbers are an end."""


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
