"""Element by element: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassengine.plugins.onnx.table import Call, OnnxNode, computes, same, translation
from glassengine.program.onnx.file import torch_dtype
from glassengine.program.onnx.function import OnnxFunction

_aten = torch.ops.aten
_OF_THE_SAME_NAME = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor HardSwish IsNaN Log Mish Neg Reciprocal Relu "
    "Round Sigmoid Sign Sin Sinh Softplus Sqrt Tan Tanh"
)
same({name: getattr(_aten, name.lower()).default for name in _OF_THE_SAME_NAME.split()})
same(
    {
        "Add": _aten.add.Tensor,
        "And": _aten.logical_and.default,
        "BitwiseAnd": _aten.bitwise_and.Tensor,
        "BitwiseNot": _aten.bitwise_not.default,
        "BitwiseOr": _aten.bitwise_or.Tensor,
        "BitwiseXor": _aten.bitwise_xor.Tensor,
        "Equal": _aten.eq.Tensor,
        "Greater": _aten.gt.Tensor,
        "GreaterOrEqual": _aten.ge.Tensor,
        "Identity": _aten.clone.default,
        "Less": _aten.lt.Tensor,
        "LessOrEqual": _aten.le.Tensor,
        "Mul": _aten.mul.Tensor,
        "Not": _aten.logical_not.default,
        "Or": _aten.logical_or.default,
        "Sub": _aten.sub.Tensor,
        "Where": _aten.where.self,
        "Xor": _aten.logical_xor.default,
    }
)


@computes("div", "Div")
def _div(x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


@computes("pow", "Pow")
def _pow(x: Tensor, y: Tensor) -> Tensor:
    return torch.pow(x, y).to(x.dtype)


@computes("remainder", "Mod")
def _mod(x: Tensor, y: Tensor, *, fmod: int = 0) -> Tensor:
    return torch.fmod(x, y) if fmod else torch.remainder(x, y)


@computes("bitwise_shift", "BitShift")
def _bit_shift(x: Tensor, y: Tensor, *, direction: str) -> Tensor:
    return x << y if direction == "LEFT" else x >> y


def _combines(name: str, op_type: str, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    computes(name, op_type)(lambda *values: functools.reduce(combine, values).clone())


_combines("maximum", "Max", torch.maximum)
_combines("minimum", "Min", torch.minimum)
_combines("sum", "Sum", torch.add)


@computes("mean", "Mean")
def _mean(*values: Tensor) -> Tensor:
    return functools.reduce(torch.add, values) / len(values)


@computes("clamp", "Clip")
def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None, **limits: float) -> Tensor:
    low = x.new_tensor(limits["min"]) if "min" in limits else low
    high = x.new_tensor(limits["max"]) if "max" in limits else high
    x = x if low is None else torch.maximum(x, low.to(x.dtype))
    return x.clone() if high is None else torch.minimum(x, high.to(x.dtype))


@computes("isinf", "IsInf")
def _isinf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    return (x.isneginf() & bool(detect_negative)) | (x.isposinf() & bool(detect_positive))


computes("elu", "Elu")(F.elu)
computes("celu", "Celu")(F.celu)
computes("softsign", "Softsign")(F.softsign)


@computes("leaky_relu", "LeakyRelu")
def _leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@computes("prelu", "PRelu")
def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


@computes("selu", "Selu")
def _selu(x: Tensor, *, alpha: float = 1.6732632423543772, gamma: float = 1.0507009873554805) -> Tensor:
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


@computes("gelu", "Gelu")
def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@computes("hardsigmoid", "HardSigmoid")
def _hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


@computes("threshold", "ThresholdedRelu")
def _thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, 0.0)


@computes("softshrink", "Shrink")
def _shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0.0))


@computes("silu", "Swish")
def _swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _cast(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def _cast_like(x: Tensor, other: Tensor) -> Tensor:
    return x.to(other.dtype)


CAST = OnnxFunction(_cast, "_to_copy")


@translation("Cast", "CastLike")
def _casts(node: OnnxNode) -> Call:
    is_like = node.proto.op_type == "CastLike"
    if is_like and not node.element_type(1):  # inside of a graph whose types are not known
        return OnnxFunction(_cast_like, "_to_copy"), tuple(node.inputs), {}
    dtype = torch_dtype(node.element_type(1) if is_like else node.attributes["to"])
    if dtype is None:
        raise NotImplementedError("a cast to a type that torch does not have")
    # As a keyword, so that the reference can retarget it to float64.
    return CAST, (node.inputs[0],), {"dtype": dtype}


def scalar(value: Tensor) -> Any:
    """Return the number that a tensor of one element holds."""
    return value.flatten()[0].item()
