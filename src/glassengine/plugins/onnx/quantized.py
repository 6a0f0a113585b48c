"""Quantized integers and back; products of integers."""

from __future__ import annotations

import torch
from torch import Tensor

from glassengine.plugins.onnx.neural import convolution
from glassengine.plugins.onnx.table import Call, OnnxNode, computes, translation
from glassengine.program.onnx.file import torch_dtype
from glassengine.program.onnx.function import OnnxFunction
from glassengine.program.onnx.grids import beside

_FOUR_BITS = {21: (0, 15), 22: (-8, 7)}
"""Element type of four-bit integers -> their range."""


@computes("dequantize", "DequantizeLinear")
def _dequantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    wide = x.to(scale.dtype) if x.dtype is not torch.int32 else x.double().to(scale.dtype)
    wide = wide if zero is None else wide - beside(zero, x, axis, block_size).to(scale.dtype)
    return wide * beside(scale, x, axis, block_size)


@translation("QuantizeLinear")
def _quantize_linear(node: OnnxNode) -> Call:
    kind = node.element_type(2) or node.attribute("output_dtype") or 2
    dtype = torch_dtype(kind)
    if dtype is None or dtype.is_floating_point:
        raise NotImplementedError("a quantized type that torch does not have")
    low, high = _FOUR_BITS.get(kind) or (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    options = {"low": low, "high": high, "kind": str(dtype).removeprefix("torch.")}
    options |= {"axis": node.attribute("axis", 1), "block_size": node.attribute("block_size", 0)}
    return OnnxFunction(_quantize, "quantize"), (*node.inputs[:2], node.input(2)), options


def _quantize(
    x: Tensor, scale: Tensor, zero: Tensor | None, *, low: int, high: int, kind: str, axis: int, block_size: int
) -> Tensor:
    steps = torch.round(x / beside(scale, x, axis, block_size).to(x.dtype))
    steps = steps if zero is None else steps + beside(zero, x, axis, block_size).to(x.dtype)
    return steps.nan_to_num(0.0).clamp(low, high).to(getattr(torch, kind))


@computes("quantize", "DynamicQuantizeLinear")
def _dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    zero = torch.round(-low / scale).nan_to_num(0.0).clamp(0, 255)
    whole = (torch.round(x / scale).nan_to_num(0.0) + zero).clamp(0, 255)
    return whole.to(torch.uint8), scale, zero.to(torch.uint8)


@computes("integer_matmul", "MatMulInteger")
def _matmul_integer(a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
    return (_centered(a, a_zero, -2) @ _centered(b, b_zero, -1)).to(torch.int32)


def _centered(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    wide = x.to(torch.int64)
    return wide if zero is None else wide - beside(zero, x, axis).to(torch.int64)


@computes("integer_conv", "ConvInteger")
def _conv_integer(
    x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None, **options: object
) -> Tensor:
    # Sums of products of bytes are whole numbers far below 2^53.
    whole: Tensor = convolution(_centered(x, x_zero, 1).double(), _centered(w, w_zero, 0).double(), None, **options)
    return whole.to(torch.int32)


@translation("QLinearMatMul", "QLinearConv")
def _q_linear(node: OnnxNode) -> Call:
    function = _q_linear_matmul if node.proto.op_type == "QLinearMatMul" else _q_linear_conv
    return OnnxFunction(function, "quantize"), tuple(node.inputs), dict(node.attributes)


def _requantized(whole: Tensor, scale: Tensor, y_zero: Tensor) -> Tensor:
    limits = torch.iinfo(y_zero.dtype)
    steps = torch.round(whole.to(scale.dtype) * scale) + y_zero.to(scale.dtype)
    return steps.clamp(limits.min, limits.max).to(y_zero.dtype)


def _q_linear_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    whole = _centered(a, a_zero, -2) @ _centered(b, b_zero, -1)
    scale = beside(a_scale, a, -2) * beside(b_scale, b, -1) / y_scale
    return _requantized(whole, scale, y_zero)


def _q_linear_conv(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    b: Tensor | None = None,
    **options: object,
) -> Tensor:
    bias = None if b is None else b.double()
    whole = convolution(_centered(x, x_zero, 1).double(), _centered(w, w_zero, 0).double(), bias, **options)
    channel = [1, -1, *[1] * (x.dim() - 2)]
    scale = x_scale * (w_scale.reshape(channel) if w_scale.numel() > 1 else w_scale.reshape(())) / y_scale
    return _requantized(whole, scale, y_zero)
