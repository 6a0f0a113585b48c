"""compressed-tensors and fp8: weights of 8 bits or less, each with its scales beside it.

compressed-tensors as `compressed_tensors/compressors` (`pack_to_int32`, `dequantize`) of llm-compressor has it:

    weight_packed int32 [O, I * bits / 32] of (integer + 2 ** (bits - 1)), weight_shape, or weight int8 or float8 [O, I]
    weight_scale [1], [O, 1], [O, I / group] or per block; weight_zero_point the same, packed along O where packed
    weight_g_idx [I]: group of each input, where they were reordered
    weight = (integer - zero_point) * scale

fp8 as DeepSeek-V3 and transformers write it:

    weight float8_e4m3fn [O, I], weight_scale_inv [ceil(O / block), ceil(I / block)] (despite its name a factor)
    weight = float8 * scale

Scales of inputs and of caches concern activations, which are not quantized here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glassengine.errors import UsageError
from glassengine.program.quantized.grid import (
    ELSEWHERE,
    Grid,
    Parts,
    Read,
    check_indices,
    damaged,
    expand,
    float8_grid,
    integer_grid,
    modules_with,
    require,
    rest,
    unpack,
)

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_NAMES = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale")


def read_compressed_tensors(parts: Parts) -> Read:
    """Yield every tensor of a compressed-tensors checkpoint by the name it has in the unquantized model."""
    groups = list((parts.settings.get("config_groups") or {}).values())
    for form in {str(parts.settings.get("format")), *(str(group.get("format") or FORMATS[0]) for group in groups)}:
        require(form in FORMATS, "this compressed-tensors format", form, ", ".join(FORMATS))
    sparsity = (parts.settings.get("sparsity_config") or {}).get("format", "dense")
    require(sparsity == "dense", "this compressed-tensors sparsity", sparsity, "dense")
    require(not parts.settings.get("transform_config"), "a checkpoint with rotations", "transform_config", "none")
    weights: list[dict[str, Any]] = [group.get("weights") or {} for group in groups]
    used = {f"{module}.{name}" for name in _OF_ACTIVATIONS for module in modules_with(parts, name)}
    for module in modules_with(parts, "weight_scale"):
        used |= {f"{module}.{name}" for name in _NAMES}
        yield f"{module}.weight", _grid(parts, module, weights)
    yield from rest(parts, used)


def _grid(parts: Parts, module: str, weights: list[dict[str, Any]]) -> Grid:
    (scale,) = parts.of(module, "weight_scale")
    zero, group = parts.maybe(module, "weight_zero_point"), parts.maybe(module, "weight_g_idx")
    block = next((tuple(found) for each in weights if (found := each.get("block_structure"))), None)
    packed = parts.maybe(module, "weight_packed")
    if packed is None:
        (codes,) = parts.of(module, "weight")
        shape = tuple(codes.shape)
        if codes.dtype.itemsize == 1 and codes.is_floating_point():
            return float8_grid(codes, expand(scale, shape, block))
        if codes.dtype is not torch.int8:
            raise UsageError(
                f"the weight of {module} has a scale and is not quantized",
                got=str(codes.dtype),
                expected="a checkpoint that was saved compressed",
                hint=ELSEWHERE,
            )
        bits = {each.get("num_bits") for each in weights}
        width = int(bits.pop() or 8) if len(bits) == 1 else 8
    else:
        (shape_of,) = parts.of(module, "weight_shape")
        if packed.dim() != 2 or shape_of.numel() != 2 or int(shape_of[0]) != packed.shape[0]:
            raise damaged(module, packed, "packed rows, as many as weight_shape says")
        shape = (packed.shape[0], int(shape_of[1]))
        width = _bits(packed, shape[1], weights, module)
        codes = unpack(packed, width, shape[1]) - (1 << width - 1)
        if zero is not None and zero.dtype is torch.int32 and scale.dim() == 2:
            zero = unpack(zero.T, width, shape[0]).T - (1 << width - 1)
    if group is not None:
        chosen = check_indices(group, scale.shape[-1], f"{module}.weight_g_idx")
        scale, zero = scale[:, chosen], None if zero is None else zero[:, chosen]
    return integer_grid(
        codes,
        expand(scale, shape, block),
        None if zero is None else expand(zero, shape, block),
        -(1 << width - 1),
        (1 << width - 1) - 1,
    )


def _bits(packed: Tensor, inputs: int, weights: list[dict[str, Any]], module: str) -> int:
    """Return the width of the integers: of those that the configuration names, the one that fits."""
    for each in weights:
        bits = each.get("num_bits")
        if isinstance(bits, int) and 1 <= bits <= 8 and packed.shape[1] == -(-inputs * bits // 32):
            return bits
    raise damaged(module, packed, f"{inputs} integers a row, of the bits that config_groups names")


def read_fp8(parts: Parts) -> Read:
    """Yield every tensor of an "fp8" checkpoint by the name it has in the unquantized model."""
    size = parts.settings.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))
    used: set[str] = {name for name in parts.tensors if name.endswith(".activation_scale")}
    for module in modules_with(parts, "weight_scale_inv"):
        weight, scale = parts.of(module, "weight", "weight_scale_inv")
        require(weight.dtype.itemsize == 1 and weight.is_floating_point(), "this fp8 weight", weight.dtype, "float8")
        require(scale.dtype.itemsize > 1, "a scale of one byte (MXFP8)", scale.dtype, "float32 or bfloat16")
        used |= {f"{module}.weight", f"{module}.weight_scale_inv"}
        yield f"{module}.weight", float8_grid(weight, expand(scale, tuple(weight.shape), block))
    yield from rest(parts, used)
