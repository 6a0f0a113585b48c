"""`Resize`: one axis after another, by what the operator says of coordinates, rounding and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from glassengine.plugins.onnx.operators.shapes import NUMBERS, integers
from glassengine.plugins.onnx.operators.table import Call, OnnxNode, translation
from glassengine.program.onnx.operators.function import OnnxFunction

_NAMES = {"nearest": "index_select", "linear": "upsample_bilinear2d", "cubic": "upsample_bicubic2d"}


@translation("Resize")
def _resize(node: OnnxNode) -> Call:
    options = {
        "mode": node.attribute("mode", "nearest"),
        "transform": node.attribute("coordinate_transformation_mode", "half_pixel"),
        "nearest": node.attribute("nearest_mode", "round_prefer_floor"),
        "cubic": node.attribute("cubic_coeff_a", -0.75),
        "axes": node.attribute("axes"),
    }
    others = ("antialias", "exclude_outside", "keep_aspect_ratio_policy")
    is_plain = all(node.attribute(name) in (None, 0, "stretch") for name in others)
    if node.opset < 11 or not is_plain or options["transform"] in ("tf_crop_and_resize", "half_pixel_symmetric"):
        raise NotImplementedError("a resize of another kind")
    scales = node.input(2)
    factors = None if scales is None else node.helper(NUMBERS, scales)
    return OnnxFunction(_resized, _NAMES[options["mode"]]), (node.inputs[0], factors, node.input(3)), options


def _resized(
    x: Tensor,
    scales: tuple[float, ...] | None,
    sizes: Tensor | None,
    *,
    mode: str,
    transform: str,
    nearest: str,
    cubic: float,
    axes: list[int] | None,
) -> Tensor:
    dims = [dim % x.dim() for dim in axes or range(x.dim())]
    if sizes is not None and sizes.numel():
        wanted = integers(sizes)
        factors = [size / x.shape[dim] for size, dim in zip(wanted, dims, strict=True)]
    else:
        assert scales is not None
        factors = list(scales)
        wanted = [int(x.shape[dim] * factor) for factor, dim in zip(factors, dims, strict=True)]
    for dim, size, factor in zip(dims, wanted, factors, strict=True):
        if factor == 1 and size == x.shape[dim]:
            continue
        place = _places(size, x.shape[dim], factor, transform)
        if mode == "nearest":
            x = x.index_select(dim, _ROUNDED[nearest](place).clamp(0, x.shape[dim] - 1).long())
        elif not x.is_floating_point():
            return _resized(
                x.double(), scales, sizes, mode=mode, transform=transform, nearest=nearest, cubic=cubic, axes=axes
            ).to(x.dtype)
        else:
            x = _weighted(x, dim, place, _linear if mode == "linear" else lambda part: _cubic(part, cubic))
    return x.clone()


def _places(size: int, old: int, factor: float, transform: str) -> Tensor:
    """Return where each of `size` new elements lies among `old` ones."""
    at = torch.arange(size, dtype=torch.float64)
    if transform == "asymmetric":
        return at / factor
    if transform == "align_corners":
        return at * (old - 1) / (size - 1) if size > 1 else at * 0
    if transform == "pytorch_half_pixel" and size == 1:
        return at * 0
    return (at + 0.5) / factor - 0.5


_ROUNDED: dict[str, Any] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round_prefer_floor": lambda place: torch.ceil(place - 0.5),
    "round_prefer_ceil": lambda place: torch.floor(place + 0.5),
}


def _weighted(x: Tensor, dim: int, place: Tensor, weights_of: Any) -> Tensor:
    first = place.floor()
    weights = weights_of(place - first)
    shape = [-1 if i == dim else 1 for i in range(x.dim())]
    start = 1 - len(weights) // 2
    total: Tensor | None = None
    for number, weight in enumerate(weights):
        part = x.index_select(dim, (first + start + number).clamp(0, x.shape[dim] - 1).long())
        term = part * weight.to(x.dtype).reshape(shape)
        total = term if total is None else total + term
    assert total is not None
    return total


def _linear(part: Tensor) -> list[Tensor]:
    return [1 - part, part]


def _cubic(part: Tensor, a: float) -> list[Tensor]:
    def near(t: Tensor) -> Tensor:
        return ((a + 2) * t - (a + 3)) * t * t + 1

    def far(t: Tensor) -> Tensor:
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    return [far(1 + part), near(part), near(1 - part), far(2 - part)]
