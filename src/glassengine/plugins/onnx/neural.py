"""Products, convolutions, pooling, reductions, normalizations, softmax.

Largest values of windows, and where they lie; what is padded around windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassengine.plugins.onnx.shapes import integers
from glassengine.plugins.onnx.table import TRANSLATIONS, Call, OnnxNode, computes, same, translation
from glassengine.program.onnx.function import OnnxFunction

_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_WITH_PLACES = {1: F.max_pool1d_with_indices, 2: F.max_pool2d_with_indices, 3: F.max_pool3d_with_indices}


def amounts_of(
    sizes: tuple[int, ...],
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    pads: list[int] | None,
    auto_pad: str,
) -> list[int]:
    """Return the padding of the last dimensions in torch's order: (before, after) of the last one first."""
    if auto_pad.startswith("SAME"):
        both = []
        for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
            total = max(0, (-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size)
            less = total // 2
            both.append((less, total - less) if auto_pad == "SAME_UPPER" else (total - less, less))
    else:
        rank = len(kernel)
        given = pads or [0] * (2 * rank)
        both = list(zip(given[:rank], given[rank:], strict=True))
    return [amount for pair in reversed(both) for amount in pair]


@translation("MaxPool")
def _max_pool(node: OnnxNode) -> Call:
    with_places = len(node.proto.output) > 1
    if with_places and (node.attribute("storage_order") or len(node.attribute("kernel_shape")) > 3):
        raise NotImplementedError("indices of columns first")
    options = {name: node.attribute(name) for name in ("kernel_shape", "strides", "dilations", "pads")}
    options |= {"auto_pad": node.attribute("auto_pad", "NOTSET"), "ceil_mode": node.attribute("ceil_mode", 0)}
    if with_places:
        return OnnxFunction(_with_places, "max_pool2d_with_indices"), (node.inputs[0],), options
    return OnnxFunction(_pooled_max, "max_pool2d"), (node.inputs[0],), options


def _windows(x: Tensor, options: Mapping[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """Return strides, dilations and padding of the windows over `x`."""
    sizes, kernel = tuple(x.shape[2:]), options["kernel_shape"]
    steps, widths = options["strides"] or [1] * len(kernel), options["dilations"] or [1] * len(kernel)
    amounts = amounts_of(sizes, kernel, steps, widths, options["pads"], options["auto_pad"])
    return steps, widths, to_ceiling(sizes, kernel, steps, widths, amounts) if options["ceil_mode"] else amounts


def _with_places(x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return largest values and where they lie in the whole of `x`, row by row."""
    # Padded with what is never largest, so that the place in the padded plane is the place of a value.
    numbers = torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)
    kernel = options["kernel_shape"]
    steps, widths, amounts = _windows(x, options)
    padded = F.pad(x.double(), amounts, value=-math.inf)
    values, places = _WITH_PLACES[len(kernel)](padded, kernel, steps, [0] * len(kernel), widths)
    flat = F.pad(numbers, amounts, value=-1.0).flatten(2).gather(2, places.flatten(2)).reshape(values.shape)
    return values.to(x.dtype), flat.long()


def _pooled_max(x: Tensor, **options: Any) -> Tensor:
    kernel = options["kernel_shape"]
    steps, widths, amounts = _windows(x, options)
    low = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded: Tensor = F.pad(x, amounts, value=low)
    pool = _MAX_POOLS[len(kernel)]
    if not x.is_floating_point():
        return pool(padded.double(), kernel, steps, 0, widths).to(x.dtype)
    return pool(padded, kernel, steps, 0, widths)


def to_ceiling(
    sizes: tuple[int, ...], kernel: list[int], strides: list[int], dilations: list[int], amounts: list[int]
) -> list[int]:
    """Return padding after which the last, partial windows are whole; a window begins before the right padding."""
    more = list(amounts)
    for i, size in enumerate(sizes):
        at = 2 * (len(sizes) - 1 - i)
        span = size + amounts[at] + amounts[at + 1] - ((kernel[i] - 1) * dilations[i] + 1)
        windows = -(-span // strides[i])
        if windows * strides[i] >= size + amounts[at]:
            windows -= 1
        more[at + 1] += max(0, windows * strides[i] - span)
    return more


same({"MatMul": torch.ops.aten.matmul.default})


def _transposed(x: Tensor) -> Tensor:
    return x.T


TRANSPOSED = OnnxFunction(_transposed, "t")


@translation("Gemm")
def _gemm(node: OnnxNode) -> Call:
    a, b, c = node.inputs[0], node.inputs[1], node.input(2)
    scale = {"alpha": node.attribute("alpha", 1.0), "beta": node.attribute("beta", 1.0)}
    trans_a, trans_b = node.attribute("transA", 0), node.attribute("transB", 0)
    # What a linear layer becomes; a bias of another rank is not a bias to torch.
    plain = not trans_a and trans_b and scale["alpha"] == 1.0 and (c is None or scale["beta"] == 1.0)
    if plain and (c is None or (node.shapes[2] is not None and node.shapes[2] == (node.shapes[1] or ("?",))[:1])):
        return torch.ops.aten.linear.default, (a, b, c), {}
    a = node.helper(TRANSPOSED, a) if trans_a else a
    b = node.helper(TRANSPOSED, b) if trans_b else b
    if c is None:
        return OnnxFunction(_product, "mm"), (a, b), {"alpha": scale["alpha"]}
    return OnnxFunction(_added_product, "addmm"), (c, a, b), scale


def _product(a: Tensor, b: Tensor, *, alpha: float) -> Tensor:
    return alpha * (a @ b)


def _added_product(c: Tensor, a: Tensor, b: Tensor, *, alpha: float, beta: float) -> Tensor:
    return alpha * (a @ b) + beta * c


@computes("einsum", "Einsum")
def _einsum(*operands: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *operands)


@computes("convolution", "Conv")
def convolution(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    """Convolve `x` [B, C, ...] with `w` [O, C / group, ...] in any number of dimensions."""
    rank = w.dim() - 2
    kernel = kernel_shape or list(w.shape[2:])
    steps, widths = strides or [1] * rank, dilations or [1] * rank
    padded = F.pad(x, amounts_of(tuple(x.shape[2:]), kernel, steps, widths, pads, auto_pad))
    return torch.convolution(padded, w, b, steps, [0] * rank, widths, False, [0] * rank, group)


@computes("conv_transpose2d", "ConvTranspose")
def _conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None,
    output_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> Tensor:
    rank = w.dim() - 2
    kernel = kernel_shape or list(w.shape[2:])
    steps, widths, more = strides or [1] * rank, dilations or [1] * rank, output_padding or [0] * rank
    before, after = (pads or [0] * (2 * rank))[:rank], (pads or [0] * (2 * rank))[rank:]
    wanted, missing = output_shape[-rank:] if output_shape else None, [0] * rank
    if wanted is None and auto_pad.startswith("SAME"):
        wanted = [size * step for size, step in zip(x.shape[2:], steps, strict=True)]
    if wanted is not None:
        whole = [
            step * (size - 1) + extra + (k - 1) * width + 1
            for size, step, extra, k, width in zip(x.shape[2:], steps, more, kernel, widths, strict=True)
        ]
        total = [max(0, full - size) for full, size in zip(whole, wanted, strict=True)]
        missing = [max(0, size - full) for full, size in zip(whole, wanted, strict=True)]
        less = [amount // 2 for amount in total]
        rest = [amount - half for amount, half in zip(total, less, strict=True)]
        before, after = (less, rest) if auto_pad == "SAME_UPPER" else (rest, less)
    full = torch.convolution(x, w, None, steps, [0] * rank, widths, True, more, group)
    for i in range(rank):
        full = full.narrow(i + 2, before[i], full.shape[i + 2] - before[i] - after[i])
    full = F.pad(full, [amount for size in reversed(missing) for amount in (0, size)])
    return full if b is None else full + b.reshape(1, -1, *[1] * rank)


@translation("AveragePool")
def _average_pool(node: OnnxNode) -> Call:
    if any(width != 1 for width in node.attribute("dilations") or []):
        raise NotImplementedError("a dilated average")
    options = {name: node.attribute(name) for name in ("kernel_shape", "strides", "pads")}
    options |= {name: node.attribute(name, 0) for name in ("ceil_mode", "count_include_pad")}
    options["auto_pad"] = node.attribute("auto_pad", "NOTSET")
    return OnnxFunction(_pooled_average, "avg_pool2d"), (node.inputs[0],), options


_AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _pooled_average(
    x: Tensor,
    *,
    kernel_shape: list[int],
    strides: list[int] | None,
    pads: list[int] | None,
    auto_pad: str,
    ceil_mode: int,
    count_include_pad: int,
) -> Tensor:
    rank = len(kernel_shape)
    steps, ones = strides or [1] * rank, [1] * rank
    amounts = amounts_of(tuple(x.shape[2:]), kernel_shape, steps, ones, pads, auto_pad)
    whole = to_ceiling(tuple(x.shape[2:]), kernel_shape, steps, ones, amounts) if ceil_mode else amounts
    # What is counted: the values and, where that is asked for, the padding; never what completes a partial window.
    counted = F.pad(torch.ones_like(x[:1, :1]), amounts, value=float(count_include_pad))
    counted = F.pad(counted, [b - a for a, b in zip(amounts, whole, strict=True)])
    pool: Callable[..., Tensor] = _AVERAGES[rank]
    return pool(F.pad(x, whole), kernel_shape, steps) / pool(counted, kernel_shape, steps)


@computes("mean", "GlobalAveragePool")
def _global_average_pool(x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), keepdim=True)


@computes("amax", "GlobalMaxPool")
def _global_max_pool(x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), keepdim=True)


def _reduces(op_type: str, name: str, reduce: Callable[[Tensor, list[int], bool], Tensor]) -> None:
    def reduced(
        x: Tensor,
        where: Tensor | list[int] | None = None,
        *,
        axes: list[int] | None = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        dims = where if isinstance(where, list) else integers(where, axes)
        if not dims and noop_with_empty_axes:
            return reduce(x.unsqueeze(0), [0], False)
        return reduce(x, sorted(dim % x.dim() for dim in dims or range(x.dim())), bool(keepdims))

    TRANSLATIONS[op_type] = lambda node: (OnnxFunction(reduced, name), tuple(node.inputs), dict(node.attributes))


def _product_over(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    for dim in reversed(dims):
        x = x.prod(dim, keepdim=keep)
    return x


_reduces("ReduceSum", "sum", lambda x, dims, keep: x.sum(dims, keepdim=keep, dtype=x.dtype) if dims else x.clone())
_reduces("ReduceMean", "mean", lambda x, dims, keep: _mean(x, dims, keep))
_reduces("ReduceMax", "amax", lambda x, dims, keep: _extreme(x, dims, -1).amax(dims, keepdim=keep))
_reduces("ReduceMin", "amin", lambda x, dims, keep: _extreme(x, dims, 1).amin(dims, keepdim=keep))
_reduces("ReduceProd", "prod", _product_over)
_reduces("ReduceL1", "sum", lambda x, dims, keep: x.abs().sum(dims, keepdim=keep, dtype=x.dtype))
_reduces("ReduceL2", "norm", lambda x, dims, keep: x.square().sum(dims, keepdim=keep).sqrt())
_reduces("ReduceSumSquare", "sum", lambda x, dims, keep: x.square().sum(dims, keepdim=keep, dtype=x.dtype))
_reduces("ReduceLogSum", "log_of_sum", lambda x, dims, keep: x.sum(dims, keepdim=keep).log())
_reduces("ReduceLogSumExp", "log_of_sum", lambda x, dims, keep: x.logsumexp(dims, keepdim=keep))


def _extreme(x: Tensor, dims: list[int], sign: int) -> Tensor:
    """Return `x` with the extreme of nothing where it is empty along one of `dims`."""
    if all(x.shape[dim] for dim in dims):
        return x
    shape = [1 if i in dims else size for i, size in enumerate(x.shape)]
    if x.dtype is torch.bool:
        return x.new_full(shape, sign > 0)
    info = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
    return x.new_full(shape, sign * math.inf if x.is_floating_point() else (info.max if sign > 0 else info.min))


def _mean(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(dims, keepdim=keep)
    return torch.div(x.sum(dims, keepdim=keep), math.prod(x.shape[i] for i in dims), rounding_mode="trunc").to(x.dtype)


@computes("cumsum", "CumSum")
def _cumsum(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    dim = int(axis)
    x = x.flip(dim) if reverse else x
    total = x.cumsum(dim, dtype=x.dtype)
    if exclusive:
        total = torch.cat([torch.zeros_like(total.narrow(dim, 0, 1)), total.narrow(dim, 0, x.shape[dim] - 1)], dim)
    return total.flip(dim) if reverse else total


def _normalized_exponential(kind: str) -> None:
    def over_one(x: Tensor, dim: int) -> Tensor:
        return x.log_softmax(dim) if kind == "log_softmax" else x.softmax(dim)

    def over_rest(x: Tensor, dim: int) -> Tensor:
        flat = x.reshape(math.prod(x.shape[:dim]), -1)
        return over_one(flat, 1).reshape(x.shape)

    def translate(node: OnnxNode) -> Call:
        # Before opset 13 all dimensions from the axis on are one; without a bound where that makes a difference.
        axis = node.attribute("axis", -1 if node.opset >= 13 else 1)
        rank = None if node.shapes[0] is None else len(node.shapes[0])
        if node.opset >= 13 or (rank is not None and axis % max(1, rank) == rank - 1):
            return OnnxFunction(over_one, kind), (node.inputs[0], axis), {}
        return OnnxFunction(over_rest, f"{kind}_of_rest"), (node.inputs[0], axis), {}

    TRANSLATIONS["Softmax" if kind == "softmax" else "LogSoftmax"] = translate


_normalized_exponential("softmax")
_normalized_exponential("log_softmax")


@computes("hardmax", "Hardmax")
def _hardmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return F.one_hot(x.argmax(axis), x.shape[axis]).movedim(-1, axis).to(x.dtype)


def _normalized_dims(node: OnnxNode) -> list[int]:
    """Return as many zeros as there are dimensions that a normalization is over: bounds ask only how many."""
    axis = node.attribute("axis", -1)
    if len(node.proto.output) > 1 or (node.shapes[0] is None and axis >= 0):
        raise NotImplementedError("statistics of a normalization, or an unknown rank")
    return [0] * (-axis if axis < 0 else len(node.shapes[0] or ()) - axis)


@translation("LayerNormalization")
def _layer_norm(node: OnnxNode) -> Call:
    dims = _normalized_dims(node)
    arguments = (node.inputs[0], dims, node.input(1), node.input(2), node.attribute("epsilon", 1e-5))
    return OnnxFunction(_layer_normalized, "layer_norm"), arguments, {}


def _layer_normalized(x: Tensor, dims: list[int], w: Tensor | None, b: Tensor | None, eps: float) -> Tensor:
    inner = x.shape[x.dim() - len(dims) :]
    y = F.layer_norm(x, inner, None, None, eps)
    y = y if w is None else y * w
    return y if b is None else y + b


@translation("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_norm(node: OnnxNode) -> Call:
    dims = _normalized_dims(node)
    arguments = (node.inputs[0], dims, node.input(1), node.attribute("epsilon", 1e-5))
    return OnnxFunction(_rms_normalized, "rms_norm"), arguments, {}


def _rms_normalized(x: Tensor, dims: list[int], w: Tensor | None, eps: float) -> Tensor:
    y = x * (x.square().mean(list(range(-len(dims), 0)), keepdim=True) + eps).rsqrt()
    return y if w is None else y * w


@translation("BatchNormalization")
def _batch_norm(node: OnnxNode) -> Call:
    if len([name for name in node.proto.output if name]) > 1 or node.attribute("training_mode"):
        raise NotImplementedError("training")
    arguments = (*node.inputs[:5], False, 0.1, node.attribute("epsilon", 1e-5))
    return OnnxFunction(_batch_normalized, "_native_batch_norm_legit_no_training"), arguments, {}


def _batch_normalized(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, training: bool, momentum: float, eps: float
) -> Tensor:
    # Written out, because the statistics may be of another type than `x`.
    channel = [1, -1, *[1] * (x.dim() - 2)] if x.dim() > 1 else [-1]
    weight, bias, mean, var = (part.to(x.dtype).reshape(channel) for part in (weight, bias, mean, var))
    result: Tensor = (x - mean) / (var + eps).sqrt() * weight + bias
    return result


@translation("InstanceNormalization", "GroupNormalization")
def _group_norm(node: OnnxNode) -> Call:
    if node.proto.op_type == "GroupNormalization" and node.opset < 21:
        raise NotImplementedError("scales by group")
    groups = node.attribute("num_groups")
    arguments = (node.inputs[0], groups, node.inputs[1], node.inputs[2], node.attribute("epsilon", 1e-5))
    # Of an instance every channel is a group; how many there are is known when it runs.
    return OnnxFunction(_group_normalized, "group_norm" if groups else "instance_norm"), arguments, {}


def _group_normalized(x: Tensor, groups: int | None, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return F.group_norm(x, groups or x.shape[1], w, b, eps)


@translation("Dropout")
def _dropout(node: OnnxNode) -> Call:
    if len(node.proto.output) > 1 or node.input(2) is not None:
        raise NotImplementedError("training")
    return torch.ops.aten.clone.default, (node.inputs[0],), {}


@computes("local_response_norm", "LRN")
def _local_response_norm(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    return F.local_response_norm(x, size, alpha, beta, bias)


@computes("norm_ratio", "LpNormalization")
def _lp_normalized(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    size = x.abs().sum(axis, keepdim=True) if p == 1 else x.square().sum(axis, keepdim=True).sqrt()
    return torch.where(size == 0, 0.0, x / size)
