"""AWQ: 4 bit integers packed along the outputs in an order of its own, one scale and zero per group and output.

As AutoAWQ's "gemm" version writes it (`WQLinear_GEMM`, `unpack_awq`, `reverse_awq_order`):

    qweight [I, O / 8], qzeros [I / group, O / 8], scales [I / group, O]
    the eight integers of a word, least significant first, are outputs 0, 2, 4, 6, 1, 3, 5, 7 of their eight
    weight[o, i] = scales[g, o] * (q[i, o] - zero[g, o]),   g = i // group

Weights were scaled before they were quantized, and the layer before them by the inverse: a single weight is not the
unquantized model's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glassengine.program.quantized.grid import Grid, damaged, expand, integer_grid, unpack
from glassengine.program.quantized.parts import Parts, Read, modules_with, require, rest

_BITS = 4
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NAMES = ("qweight", "qzeros", "scales")


def read(parts: Parts) -> Read:
    """Yield every tensor of an AWQ checkpoint by the name it has in the unquantized model."""
    version = str(parts.settings.get("version", parts.settings.get("format", "gemm"))).lower()
    bits = parts.settings.get("bits", parts.settings.get("w_bit", _BITS))
    require(version == "gemm", "this AWQ packing", version, "version gemm")
    require(bits == _BITS, "this AWQ packing", f"{bits} bits", "4 bits")
    used: set[str] = set()
    for module in modules_with(parts, "qweight"):
        used |= {f"{module}.{name}" for name in _NAMES}
        yield f"{module}.weight", _grid(parts, module)
    yield from rest(parts, used)


def _grid(parts: Parts, module: str) -> Grid:
    packed, packed_zeros, scales = parts.of(module, *_NAMES)
    for tensor in (packed, packed_zeros, scales):
        if tensor.dim() != 2 or not tensor.numel():
            raise damaged(module, tensor, "a matrix")
    groups, outputs = scales.shape
    if packed_zeros.shape[0] != groups or packed.shape[0] % groups:
        raise damaged(module, packed_zeros, f"a row for each of {groups} groups")
    codes, zeros = _in_order(packed, outputs), _in_order(packed_zeros, outputs)
    shape = (outputs, packed.shape[0])
    return integer_grid(codes.T, expand(scales.T, shape), expand(zeros.T, shape), 0, (1 << _BITS) - 1)


def _in_order(packed: Tensor, outputs: int) -> Tensor:
    """Return the integers [rows, outputs] of words [rows, outputs / 8]."""
    words = unpack(packed, _BITS, outputs).reshape(len(packed), -1, len(_ORDER))
    ordered = torch.empty_like(words)
    ordered[..., list(_ORDER)] = words
    return ordered.flatten(1)
