"""GPTQ and AWQ: integers packed into words of 32 bits, one scale and zero per group of inputs and output.

    weight[o, i] = scales[g, o] * (q[i, o] - zero[g, o])

GPTQ as GPTQModel and AutoGPTQ write it (`QuantLinear.pack`, `dequantize_weight`), packed along the inputs, 2, 3, 4 or 8
bits:

    qweight [I * bits / 32, O], qzeros [groups, O * bits / 32], scales [groups, O], g_idx [I] (group of each input)

In "gptq" (version 1) the zero that is stored is one less than the zero that is meant, modulo 2 ** bits; in "gptq_v2" it
is the zero itself. The number of bits follows from the shapes: a checkpoint may have several.

AWQ as AutoAWQ's "gemm" version writes it (`WQLinear_GEMM`, `reverse_awq_order`), packed along the outputs, 4 bits:

    qweight [I, O / 8], qzeros [I / group, O / 8], scales [I / group, O]
    the eight integers of a word, least significant first, are outputs 0, 2, 4, 6, 1, 3, 5, 7 of their eight

Weights were scaled before AWQ quantized them, and the layer before them by the inverse: a single weight is not the
unquantized model's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glassengine.program.quantized.grid import (
    Grid,
    Parts,
    Read,
    check_indices,
    damaged,
    expand,
    integer_grid,
    modules_with,
    require,
    rest,
    unpack,
)

_NAMES = ("qweight", "qzeros", "scales")
_AWQ_BITS = 4
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read_gptq(parts: Parts) -> Read:
    """Yield every tensor of a GPTQ checkpoint by the name it has in the unquantized model."""
    version = parts.settings.get("checkpoint_format", "gptq")
    require(version in ("gptq", "gptq_v2"), "this GPTQ packing", version, "checkpoint_format gptq or gptq_v2")
    require(not parts.settings.get("is_marlin_format"), "this GPTQ packing", "marlin", "gptq or gptq_v2")
    modules = modules_with(parts, "qweight")
    for module in modules:
        yield f"{module}.weight", _gptq(parts, module, 1 if version == "gptq" else 0)
    yield from rest(parts, {f"{module}.{name}" for module in modules for name in (*_NAMES, "g_idx")})


def read_awq(parts: Parts) -> Read:
    """Yield every tensor of an AWQ checkpoint by the name it has in the unquantized model."""
    version = str(parts.settings.get("version", parts.settings.get("format", "gemm"))).lower()
    bits = parts.settings.get("bits", parts.settings.get("w_bit", _AWQ_BITS))
    require(version == "gemm", "this AWQ packing", version, "version gemm")
    require(bits == _AWQ_BITS, "this AWQ packing", f"{bits} bits", "4 bits")
    modules = modules_with(parts, "qweight")
    for module in modules:
        yield f"{module}.weight", _awq(parts, module)
    yield from rest(parts, {f"{module}.{name}" for module in modules for name in _NAMES})


def _matrices(parts: Parts, module: str) -> tuple[Tensor, ...]:
    tensors = parts.of(module, *_NAMES)
    for tensor in tensors:
        if tensor.dim() != 2 or not tensor.numel():
            raise damaged(module, tensor, "a matrix")
    return tensors


def _gptq(parts: Parts, module: str, offset: int) -> Grid:
    packed, packed_zeros, scales = _matrices(parts, module)
    groups, outputs = scales.shape
    bits = packed_zeros.shape[1] * 32 // outputs
    if bits not in (2, 3, 4, 8) or packed.shape[1] != outputs or packed_zeros.shape[0] != groups:
        raise damaged(module, packed_zeros, f"int32 [{groups}, bits * {outputs} / 32], bits 2, 3, 4 or 8")
    inputs = packed.shape[0] * 32 // bits
    codes = unpack(packed.T, bits, inputs)
    # Of a few zeros that are stored a bit must not reach the next one: added after unpacking.
    zeros = (unpack(packed_zeros, bits, outputs) + offset) % (1 << bits)
    group = parts.maybe(module, "g_idx")
    if group is None:
        group = torch.arange(inputs) // -(-inputs // groups)
    elif tuple(group.shape) != (inputs,):
        raise damaged(f"{module}.g_idx", group, f"[{inputs}]")
    group = check_indices(group, groups, f"{module}.g_idx")
    return integer_grid(codes, scales.T[:, group], zeros.T[:, group], 0, (1 << bits) - 1)


def _awq(parts: Parts, module: str) -> Grid:
    packed, packed_zeros, scales = _matrices(parts, module)
    groups, outputs = scales.shape
    if packed_zeros.shape[0] != groups or packed.shape[0] % groups:
        raise damaged(module, packed_zeros, f"a row for each of {groups} groups")
    codes, zeros = _in_order(packed, outputs), _in_order(packed_zeros, outputs)
    shape = (outputs, packed.shape[0])
    return integer_grid(codes.T, expand(scales.T, shape), expand(zeros.T, shape), 0, (1 << _AWQ_BITS) - 1)


def _in_order(packed: Tensor, outputs: int) -> Tensor:
    """Return the integers [rows, outputs] of words [rows, outputs / 8]."""
    words = unpack(packed, _AWQ_BITS, outputs).reshape(len(packed), -1, len(_AWQ_ORDER))
    ordered = torch.empty_like(words)
    ordered[..., list(_AWQ_ORDER)] = words
    return ordered.flatten(1)
