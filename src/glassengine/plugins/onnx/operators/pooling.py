"""Largest values of windows, and where they lie; what is padded around windows."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassengine.plugins.onnx.operators.table import Call, OnnxNode, translation
from glassengine.program.onnx.operators.function import OnnxFunction

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


def _with_places(x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return largest values and where they lie in the whole of `x`, row by row."""
    sizes = tuple(x.shape[2:])
    # Padded with what is never largest, so that the place in the padded plane is the place of a value.
    numbers = torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)
    kernel = options["kernel_shape"]
    steps, widths = options["strides"] or [1] * len(kernel), options["dilations"] or [1] * len(kernel)
    amounts = amounts_of(sizes, kernel, steps, widths, options["pads"], options["auto_pad"])
    if options["ceil_mode"]:
        amounts = to_ceiling(sizes, kernel, steps, widths, amounts)
    padded = F.pad(x.double(), amounts, value=-math.inf)
    values, places = _WITH_PLACES[len(kernel)](padded, kernel, steps, [0] * len(kernel), widths)
    flat = F.pad(numbers, amounts, value=-1.0).flatten(2).gather(2, places.flatten(2)).reshape(values.shape)
    return values.to(x.dtype), flat.long()


def _pooled_max(
    x: Tensor,
    *,
    kernel_shape: list[int],
    strides: list[int] | None,
    dilations: list[int] | None,
    pads: list[int] | None,
    auto_pad: str,
    ceil_mode: int,
) -> Tensor:
    rank = len(kernel_shape)
    steps, widths = strides or [1] * rank, dilations or [1] * rank
    amounts = amounts_of(tuple(x.shape[2:]), kernel_shape, steps, widths, pads, auto_pad)
    if ceil_mode:
        amounts = to_ceiling(tuple(x.shape[2:]), kernel_shape, steps, widths, amounts)
    low = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded: Tensor = F.pad(x, amounts, value=low)
    if not x.is_floating_point():
        return _MAX_POOLS[rank](padded.double(), kernel_shape, steps, 0, widths).to(x.dtype)
    return _MAX_POOLS[rank](padded, kernel_shape, steps, 0, widths)


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
