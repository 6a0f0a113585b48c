"""GPTQ: integers packed along the inputs, one scale and zero per group of inputs and output.

As GPTQModel and AutoGPTQ write it (`QuantLinear.pack`, `dequantize_weight`), 2, 3, 4 or 8 bits:

    qweight [I * bits / 32, O], qzeros [groups, O * bits / 32], scales [groups, O], g_idx [I] (group of each input)
    weight[o, i] = scales[g, o] * (q[i, o] - zero[g, o]),   g = g_idx[i]

In "gptq" (version 1) the zero that is stored is one less than the zero that is meant, modulo 2 ** bits; in "gptq_v2" it
is the zero itself. The number of bits follows from the shapes: a checkpoint may have several.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glassengine.program.quantized.grid import Grid, damaged, integer_grid, unpack
from glassengine.program.quantized.parts import Parts, Read, check_indices, modules_with, require, rest

_NAMES = ("qweight", "qzeros", "scales", "g_idx")


def read(parts: Parts) -> Read:
    """Yield every tensor of a GPTQ checkpoint by the name it has in the unquantized model."""
    version = parts.settings.get("checkpoint_format", "gptq")
    require(version in ("gptq", "gptq_v2"), "this GPTQ packing", version, "checkpoint_format gptq or gptq_v2")
    require(not parts.settings.get("is_marlin_format"), "this GPTQ packing", "marlin", "gptq or gptq_v2")
    used: set[str] = set()
    for module in modules_with(parts, "qweight"):
        used |= {f"{module}.{name}" for name in _NAMES}
        yield f"{module}.weight", _grid(parts, module, 1 if version == "gptq" else 0)
    yield from rest(parts, used)


def _grid(parts: Parts, module: str, offset: int) -> Grid:
    packed, packed_zeros, scales = parts.of(module, "qweight", "qzeros", "scales")
    for tensor in (packed, packed_zeros, scales):
        if tensor.dim() != 2 or not tensor.numel():
            raise damaged(module, tensor, "a matrix")
    groups, outputs = scales.shape
    bits = packed_zeros.shape[1] * 32 // outputs
    if bits not in (2, 3, 4, 8) or packed.shape[1] != outputs or packed_zeros.shape[0] != groups:
        raise damaged(module, packed_zeros, f"int32 [{groups}, bits * {outputs} / 32], bits 2, 3, 4 or 8")
    inputs = packed.shape[0] * 32 // bits
    codes = unpack(packed.T, bits, inputs)
    # Of a few zeros that are stored a bit must not reach the next one: added after unpacking.
    zeros = (unpack(packed_zeros, bits, outputs) + offset) % (1 << bits)
    group = _groups(parts.maybe(module, "g_idx"), inputs, groups, module)
    return integer_grid(codes, scales.T[:, group], zeros.T[:, group], 0, (1 << bits) - 1)


def _groups(g_idx: Tensor | None, inputs: int, groups: int, module: str) -> Tensor:
    if g_idx is None:
        return torch.arange(inputs) // -(-inputs // groups)
    if tuple(g_idx.shape) != (inputs,):
        raise damaged(f"{module}.g_idx", g_idx, f"[{inputs}]")
    return check_indices(g_idx, groups, f"{module}.g_idx")
