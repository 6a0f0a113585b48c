"""Formats of quantized checkpoints: bitsandbytes, GPTQ and AWQ, compressed-tensors and fp8, torchao.

As `bitsandbytes.functional` (`int8_vectorwise_dequant`, `dequantize_4bit`, `QuantState.as_dict(packed=True)`) has it:

    weight int8 [O, I], SCB [O]                    weight = int8 * SCB / 127
    weight uint8 (two a byte, high one first), weight.absmax, weight.quant_map [16], weight.quant_state.bitsandbytes__*
                                                   weight = quant_map[code] * absmax[index // blocksize]
    nested: absmax = nested_quant_map[absmax] * nested_absmax[index // nested_blocksize] + nested_offset

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

compressed-tensors as `compressed_tensors/compressors` (`pack_to_int32`, `dequantize`) of llm-compressor has it:

    weight_packed int32 [O, I * bits / 32] of (integer + 2 ** (bits - 1)), weight_shape, or weight int8 or float8 [O, I]
    weight_scale [1], [O, 1], [O, I / group] or per block; weight_zero_point the same, packed along O where packed
    weight_g_idx [I]: group of each input, where they were reordered
    weight = (integer - zero_point) * scale

fp8 as DeepSeek-V3 and transformers write it:

    weight float8_e4m3fn [O, I], weight_scale_inv [ceil(O / block), ceil(I / block)] (despite its name a factor)
    weight = float8 * scale

Scales of inputs and of caches concern activations, which are not quantized here.

As `torchao.prototype.safetensors.flatten_tensor_state_dict` names them, for a parameter `path.weight`:

    path._weight_qdata, path._weight_scale, path._weight_zero_point; header: {"_type": class, "_data": {"block_size"}}
    Int8Tensor, IntxUnpackedToInt8Tensor   (qdata - zero_point) * scale
    Float8Tensor                           qdata * scale
    Int4Tensor                             two signed integers a byte, low one first; scale and zero_point transposed;
                                           qdata * scale + zero_point (`int4_row_quantize_zp` of FBGEMM)
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from glassengine.errors import CorruptError, UsageError
from glassengine.program.loading.quantized_grid import (
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
    table_grid,
    unpack,
)
from glassengine.reading.documents import Size, parsed

_STATE = "quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 1 << 16
_Block = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class _State(msgspec.Struct):
    shape: list[Size]
    blocksize: _Block
    nested_blocksize: _Block | None = None
    nested_offset: float = 0.0


def read_bitsandbytes(parts: Parts) -> Read:
    """Yield every tensor of a bitsandbytes checkpoint by the name it has in the unquantized model."""
    used: set[str] = {name for name in parts.tensors if name.endswith(".weight_format")}
    for module in modules_with(parts, "SCB"):
        weight, scale = parts.of(module, "weight", "SCB")
        layout = parts.maybe(module, "weight_format")
        require(layout is None or not int(layout), f"the layout of {module}", layout, "rows")
        if weight.dtype is not torch.int8 or weight.dim() != 2 or tuple(scale.shape) != (weight.shape[0],):
            raise damaged(module, weight, "int8 rows, each with an SCB")
        used |= {f"{module}.weight", f"{module}.SCB"}
        yield f"{module}.weight", integer_grid(weight, scale.float()[:, None] / 127, None, -127, 127)
    for name in [name for name in parts.tensors if _STATE in name]:
        weight_name = name.partition(f".{_STATE}")[0]
        yield weight_name, _table(parts, weight_name, name)
        used |= {key for key in parts.tensors if key == weight_name or key.startswith(f"{weight_name}.")}
    yield from rest(parts, used)


def _table(parts: Parts, name: str, state_name: str) -> Grid:
    text = parts.tensors[state_name].to(torch.uint8).contiguous().flatten()
    if text.numel() > _MAX_STATE_BYTES:
        raise CorruptError(f"the state of {name} is too large", got=f"{text.numel():,} bytes")
    state = parsed(text.numpy().tobytes(), _State, name, what=f"the state of {name}")
    shape, block = tuple(state.shape), state.blocksize
    packed, absmax, table = parts.of(
        name.rpartition(".")[0], *(f"{name.rpartition('.')[2]}{suffix}" for suffix in ("", ".absmax", ".quant_map"))
    )
    packed = packed.contiguous().flatten().view(torch.uint8)
    count = math.prod(shape)
    blocks = -(-count // block) if block > 0 else 0
    if min(shape, default=0) < 1 or packed.numel() != -(-count // 2) or absmax.numel() != blocks or table.numel() != 16:
        raise damaged(name, packed, f"two values a byte of {list(shape)}, blocks of {block}")
    if state.nested_blocksize is not None:
        absmax = _nested(parts, name, state, absmax)
    indices = torch.stack([packed >> 4, packed & 0xF], dim=-1).flatten()[:count].long()
    scale = absmax.float().flatten().repeat_interleave(block)[:count]
    return table_grid(indices.reshape(shape), table, scale.reshape(shape))


def _nested(parts: Parts, name: str, state: _State, codes: Tensor) -> Tensor:
    nested, table = (parts.tensors.get(f"{name}.{key}") for key in ("nested_absmax", "nested_quant_map"))
    block = state.nested_blocksize
    assert block is not None
    if nested is None or table is None or table.numel() != 256 or codes.dtype is not torch.uint8 or block < 1:
        raise CorruptError(f"the nested scales of {name} are incomplete")
    each = nested.float().repeat_interleave(block)[: codes.numel()]
    if each.numel() != codes.numel():
        raise damaged(f"the nested scales of {name}", nested, f"one for {block} of {codes.numel()}")
    return table.float()[codes.long().flatten()] * each + state.nested_offset


_PACKED_NAMES = ("qweight", "qzeros", "scales")
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
    yield from rest(parts, {f"{module}.{name}" for module in modules for name in (*_PACKED_NAMES, "g_idx")})


def read_awq(parts: Parts) -> Read:
    """Yield every tensor of an AWQ checkpoint by the name it has in the unquantized model."""
    version = str(parts.settings.get("version", parts.settings.get("format", "gemm"))).lower()
    bits = parts.settings.get("bits", parts.settings.get("w_bit", _AWQ_BITS))
    require(version == "gemm", "this AWQ packing", version, "version gemm")
    require(bits == _AWQ_BITS, "this AWQ packing", f"{bits} bits", "4 bits")
    modules = modules_with(parts, "qweight")
    for module in modules:
        yield f"{module}.weight", _awq(parts, module)
    yield from rest(parts, {f"{module}.{name}" for module in modules for name in _PACKED_NAMES})


def _matrices(parts: Parts, module: str) -> tuple[Tensor, ...]:
    tensors = parts.of(module, *_PACKED_NAMES)
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
        yield f"{module}.weight", _scaled_grid(parts, module, weights)
    yield from rest(parts, used)


def _scaled_grid(parts: Parts, module: str, weights: list[dict[str, Any]]) -> Grid:
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


_BY_CODES = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_CLASSES = (*_BY_CODES, "Float8Tensor", "Int4Tensor")


class _Dtype(msgspec.Struct):
    data: str = msgspec.field(name="_data", default="")


class _Data(msgspec.Struct):
    block_size: list[Size] = []
    target_dtype: _Dtype | None = None


class _Described(msgspec.Struct):
    kind: str = msgspec.field(name="_type")
    data: _Data = msgspec.field(name="_data")


def read_torchao(parts: Parts) -> Read:
    """Yield every tensor of a torchao checkpoint by the name it has in the unquantized model."""
    used: set[str] = set()
    for name, text in parts.metadata.items():
        module, _, parameter = name.rpartition(".")
        if not module or f"{module}._{parameter}_qdata" not in parts.tensors:
            continue
        kind, data = _description(name, text)
        require(kind in _CLASSES, f"the torchao class of {name}", kind, ", ".join(_CLASSES))
        scale_of_input = parts.maybe(module, f"_{parameter}_act_pre_scale")
        require(scale_of_input is None, f"a scale of the input of {name}", "act_pre_scale", "none")
        used |= {f"{module}._{parameter}_{part}" for part in ("qdata", "scale", "zero_point")}
        yield name, _torchao_grid(parts, module, parameter, kind, data)
    left = [name for name in parts.tensors if name.endswith("_qdata") and name not in used]
    if left:
        raise CorruptError("the header of the file does not describe a quantized weight", got=left[0])
    yield from rest(parts, used)


def _description(name: str, text: str) -> tuple[str, _Data]:
    found = parsed(text, _Described, name, what=f"what the header says of {name}")
    return found.kind, found.data


def _torchao_grid(parts: Parts, module: str, parameter: str, kind: str, data: _Data) -> Grid:
    codes, scale = parts.of(module, f"_{parameter}_qdata", f"_{parameter}_scale")
    zero = parts.maybe(module, f"_{parameter}_zero_point")
    block = tuple(data.block_size)
    if kind == "Int4Tensor":
        return _int4(codes, scale, zero, module)
    shape = tuple(codes.shape)
    if len(block) != len(shape):
        raise damaged(f"block_size {list(block)} of {module}", codes, f"{len(block)} dimensions")
    if kind == "Float8Tensor":
        return float8_grid(codes, expand(scale, shape, block))
    bits = 8
    if kind == "IntxUnpackedToInt8Tensor":
        target = data.target_dtype.data if data.target_dtype is not None else ""
        require(target in {f"int{n}" for n in range(1, 9)}, f"the integers of {module}", target, "int1 to int8")
        bits = int(target[3:])
    end = 1 << bits - 1
    return integer_grid(
        codes, expand(scale, shape, block), None if zero is None else expand(zero, shape, block), -end, end - 1
    )


def _int4(packed: Tensor, scale: Tensor, zero: Tensor | None, module: str) -> Grid:
    if packed.dtype not in (torch.int8, torch.uint8) or zero is None:
        raise damaged(f"{module}, two integers a byte", packed, "int8, and a zero point")
    both = torch.stack([packed & 0xF, (packed >> 4) & 0xF], dim=-1).flatten(-2).to(torch.int32)
    codes = torch.where(both > 7, both - 16, both)
    shape = tuple(codes.shape)
    scale, zero = (expand(x.float().transpose(-1, -2), shape) for x in (scale, zero))
    # The zero point is a weight here, not a code: what is added, in units of the scale, is its negative.
    return integer_grid(codes, scale, -zero / scale, -8, 7)
