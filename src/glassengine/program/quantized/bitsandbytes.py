"""bitsandbytes: 8 bit integers with a scale per row, or 4 bit values of a table with a scale per block.

As `bitsandbytes.functional` (`int8_vectorwise_dequant`, `dequantize_4bit`, `QuantState.as_dict(packed=True)`) has it:

    weight int8 [O, I], SCB [O]                    weight = int8 * SCB / 127
    weight uint8 (two a byte, high one first), weight.absmax, weight.quant_map [16], weight.quant_state.bitsandbytes__*
                                                   weight = quant_map[code] * absmax[index // blocksize]
    nested: absmax = nested_quant_map[absmax] * nested_absmax[index // nested_blocksize] + nested_offset
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from glassengine.errors import CorruptError
from glassengine.program.quantized.grid import (
    Grid,
    Parts,
    Read,
    damaged,
    integer_grid,
    modules_with,
    require,
    rest,
    table_grid,
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


def read(parts: Parts) -> Read:
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
