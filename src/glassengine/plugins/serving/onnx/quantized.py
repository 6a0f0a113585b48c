"""Weights that ONNX Runtime keeps in blocks of a few bits, as the floats that they stand for.

MatMulNBits             [N, blocks, bytes of a block], a scale for each row and block, zero points or the middle
GatherBlockQuantized    [rows, bytes], blocks along one axis
DequantizeLinear        integers, a scale for each block of an axis
QMoE                    [experts, N, bytes of a row], scales of rows, or of blocks of rows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from glassengine.errors import CorruptError
from glassengine.program.onnx.grids import beside, unpacked

_BITS = (2, 4, 8)


@dataclass(frozen=True)
class Numbers:
    """A dequantized weight.

    Attributes:
        value: In float32.
        step: Of each element; None where nothing is quantized.
        types: How it is stored.
    """

    value: Tensor
    step: Tensor | None
    types: tuple[str, ...]


def of_matmul(attributes: Mapping[str, Any], inputs: list[Tensor | None]) -> Numbers:
    """Return the weight [N, K] of a MatMulNBits.

    Args:
        attributes: Of the node.
        inputs: Of the node: activations (not looked at), B, scales, zero points, g_idx.

    Raises:
        CorruptError: The parts do not fit each other.
    """
    bits, block = _format(attributes, 4)
    rows, columns = int(attributes.get("N", 0)), int(attributes.get("K", 0))
    packed, scales, zeros, groups = (inputs[at] if at < len(inputs) else None for at in (1, 2, 3, 4))
    blocks = -(-columns // block)
    if packed is None or scales is None or packed.numel() != rows * blocks * (block * bits // 8):
        raise _unfit("MatMulNBits", packed, scales)
    integers = as_floats(packed.reshape(rows, -1), bits).reshape(rows, -1)[:, :columns]
    at = torch.arange(columns) // block if groups is None else groups.flatten()[:columns].long()
    if int(at.max()) >= blocks or int(at.min()) < 0:
        raise _unfit("MatMulNBits", packed, scales)
    points = _zero_points(zeros, rows, blocks, bits)
    return _of_blocks("MatMulNBits", integers, scales, points, at, f"INT{bits} in blocks of {block}")


def of_gather(attributes: Mapping[str, Any], inputs: list[Tensor | None], plain: str) -> Numbers:
    """Return the table [rows, width] of a GatherBlockQuantized.

    Args:
        attributes: Of the node.
        inputs: Of the node: data, indices (not looked at), scales, zero points.
        plain: dtype of the data in the file; "uint8" holds several numbers a byte.

    Raises:
        CorruptError: The parts do not fit each other.
    """
    bits, block = _format(attributes, 4)
    data, scales = inputs[0], inputs[2] if len(inputs) > 2 else None
    zeros = inputs[3] if len(inputs) > 3 else None
    if data is None or scales is None or data.dim() != 2 or int(attributes.get("quantize_axis", 1)) not in (1, -1):
        raise _unfit("GatherBlockQuantized", data, scales)
    rows = data.shape[0]
    integers = as_floats(data, bits) if plain == "uint8" else data.float()
    blocks = -(-integers.shape[1] // block)
    if zeros is None and plain != "uint8":
        points = torch.zeros(rows, blocks)
    else:
        points = _zero_points(zeros, rows, blocks, bits)
    at = torch.arange(integers.shape[1]) // block
    return _of_blocks("GatherBlockQuantized", integers, scales, points, at, f"INT{bits} in blocks of {block}")


def of_linear(attributes: Mapping[str, Any], inputs: list[Tensor | None]) -> Numbers:
    """Return the numbers of a DequantizeLinear.

    Raises:
        CorruptError: The parts do not fit each other.
    """
    integers, scale = inputs[0], inputs[1] if len(inputs) > 1 else None
    zero = inputs[2] if len(inputs) > 2 else None
    if integers is None or scale is None:
        raise _unfit("DequantizeLinear", integers, scale)
    axis, block = int(attributes.get("axis", 1)), int(attributes.get("block_size", 0))
    step = beside(scale.float(), integers, axis, block)
    value = (integers.float() - (beside(zero.float(), integers, axis, block) if zero is not None else 0.0)) * step
    return Numbers(value, step.abs().expand(value.shape), (str(integers.dtype).removeprefix("torch.").upper(),))


def of_experts(attributes: Mapping[str, Any], packed: Tensor, scales: Tensor, zeros: Tensor | None) -> Numbers:
    """Return the weights [experts, N, K] of a QMoE.

    Raises:
        CorruptError: The parts do not fit each other.
    """
    bits = int(attributes.get("expert_weight_bits", 4))
    if bits not in _BITS or packed.dim() != 3 or scales.shape[:2] != packed.shape[:2]:
        raise _unfit("QMoE", packed, scales)
    experts, rows = packed.shape[:2]
    integers = as_floats(packed.reshape(experts * rows, -1), bits)
    columns = integers.shape[1]
    block = int(attributes.get("block_size", 0)) or columns
    points = _zero_points(zeros, experts * rows, -(-columns // block), bits)
    at = torch.arange(columns) // block
    found = _of_blocks("QMoE", integers, scales, points, at, f"INT{bits} in blocks of {block}")
    assert found.step is not None
    shape = (experts, rows, columns)
    return replace(found, value=found.value.reshape(shape), step=found.step.reshape(shape))


def as_floats(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers of the rows of bytes, the lowest bits of a byte first, as float32 [rows, numbers]."""
    return packed.float() if bits == 8 else unpacked(packed, bits).float()


def _format(attributes: Mapping[str, Any], bits: int) -> tuple[int, int]:
    found, block = int(attributes.get("bits", bits)), int(attributes.get("block_size", 128))
    if found not in _BITS or block < 1 or block * found % 8:
        raise CorruptError("a quantized weight has no known format", got=f"{found} bits in blocks of {block}")
    return found, block


def _of_blocks(kind: str, integers: Tensor, scales: Tensor, points: Tensor, at: Tensor, form: str) -> Numbers:
    """Return the numbers of integers [rows, columns]; `at` is the block of each column."""
    if scales.numel() != points.numel():
        raise _unfit(kind, None, scales)
    step = scales.reshape(points.shape).float()[:, at]
    return Numbers((integers - points[:, at]) * step, step.abs(), (form,))


def _zero_points(zeros: Tensor | None, rows: int, blocks: int, bits: int) -> Tensor:
    """Return the zero point of each row and block: floats, whole bytes of packed numbers, or the middle."""
    if zeros is None:
        return torch.full((rows, blocks), float(2 ** (bits - 1)))
    if zeros.is_floating_point() and zeros.numel() == rows * blocks:
        return zeros.float().reshape(rows, blocks)
    of_row = -(-blocks * bits // 8)
    if zeros.numel() == rows * of_row:
        return as_floats(zeros.reshape(rows, of_row), bits)[:, :blocks]
    raise _unfit("zero points", zeros, None)


def _unfit(kind: str, data: Tensor | None, scales: Tensor | None) -> CorruptError:
    got = ", ".join(f"{list(one.shape)}" if one is not None else "nothing" for one in (data, scales))
    return CorruptError(f"the parts of a quantized weight of {kind} do not fit each other", got=got)
