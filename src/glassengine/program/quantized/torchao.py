"""torchao, as transformers saves it: the parts of its tensors in safetensors, what they are in the header.

As `torchao.prototype.safetensors.flatten_tensor_state_dict` names them, for a parameter `path.weight`:

    path._weight_qdata, path._weight_scale, path._weight_zero_point; header: {"_type": class, "_data": {"block_size"}}
    Int8Tensor, IntxUnpackedToInt8Tensor   (qdata - zero_point) * scale
    Float8Tensor                           qdata * scale
    Int4Tensor                             two signed integers a byte, low one first; scale and zero_point transposed;
                                           qdata * scale + zero_point (`int4_row_quantize_zp` of FBGEMM)
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from glassengine.errors import CorruptError
from glassengine.program.quantized.grid import (
    Grid,
    Parts,
    Read,
    damaged,
    expand,
    float8_grid,
    integer_grid,
    require,
    rest,
)
from glassengine.reading.documents import Size, parsed

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


def read(parts: Parts) -> Read:
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
        yield name, _grid(parts, module, parameter, kind, data)
    left = [name for name in parts.tensors if name.endswith("_qdata") and name not in used]
    if left:
        raise CorruptError("the header of the file does not describe a quantized weight", got=left[0])
    yield from rest(parts, used)


def _description(name: str, text: str) -> tuple[str, _Data]:
    found = parsed(text, _Described, name, what=f"what the header says of {name}")
    return found.kind, found.data


def _grid(parts: Parts, module: str, parameter: str, kind: str, data: _Data) -> Grid:
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
