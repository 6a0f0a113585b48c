"""Ops that move, select or count, without arithmetic on the values.

`Resize`: one axis after another, by what the operator says of coordinates, rounding and weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassengine.plugins.onnx.elementwise import scalar
from glassengine.plugins.onnx.table import Call, OnnxNode, computes, translation
from glassengine.program.onnx.file import torch_dtype
from glassengine.program.onnx.function import OnnxFunction


def integers(value: Tensor | None, default: Any = None) -> Any:
    """Return the integers that a tensor holds."""
    return default if value is None else [int(number) for number in value.flatten().tolist()]


@computes("shape", "Shape")
def _shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


@computes("shape", "Size")
def _size(x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


@computes("reshape", "Reshape")
def _reshape(x: Tensor, shape: Tensor | None = None, *, allowzero: int = 0, **old: list[int]) -> Tensor:
    sizes = old["shape"] if shape is None else integers(shape)
    if not allowzero:
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    if -1 in sizes:
        # With an empty tensor torch cannot tell what is left.
        others = math.prod(size for size in sizes if size != -1)
        sizes = [x.numel() // max(1, others) if size == -1 else size for size in sizes]
    return x.reshape(sizes).clone()


@computes("permute", "Transpose")
def _transpose(x: Tensor, *, perm: list[int] | None = None) -> Tensor:
    return x.permute(perm if perm is not None else list(reversed(range(x.dim())))).contiguous()


@computes("cat", "Concat")
def _concat(*tensors: Tensor, axis: int) -> Tensor:
    return torch.cat(tensors, axis)


@computes("reshape", "Flatten")
def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])).clone()


@computes("squeeze", "Squeeze")
def _squeeze(x: Tensor, where: Tensor | None = None, *, axes: list[int] | None = None) -> Tensor:
    dims = integers(where, axes)
    return (x.squeeze() if dims is None else x.squeeze(tuple(dims))).clone()


@computes("unsqueeze", "Unsqueeze")
def _unsqueeze(x: Tensor, where: Tensor | None = None, *, axes: list[int] | None = None) -> Tensor:
    dims = integers(where, axes)
    rank = x.dim() + len(dims)
    for dim in sorted(dim % rank for dim in dims):
        x = x.unsqueeze(dim)
    return x.clone()


@computes("expand", "Expand")
def _expand(x: Tensor, shape: Tensor) -> Tensor:
    # A size of 1 in the shape leaves the tensor's own, which `Tensor.expand` does not.
    return torch.where(torch.ones((), dtype=torch.bool).expand(integers(shape)), x, x)


@computes("tile", "Tile")
def _tile(x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(integers(repeats))


@computes("slice", "Slice")
def _slice(
    x: Tensor,
    start: Tensor | None = None,
    end: Tensor | None = None,
    where: Tensor | None = None,
    step: Tensor | None = None,
    *,
    starts: list[int] | None = None,
    ends: list[int] | None = None,
    axes: list[int] | None = None,
) -> Tensor:
    first, last = integers(start, starts), integers(end, ends)
    dims = integers(where, axes) or list(range(len(first)))
    steps = integers(step) or [1] * len(first)
    for dim, low, high, stride in zip(dims, first, last, steps, strict=True):
        picked = range(x.shape[dim])[slice(low, high if high >= -x.shape[dim] or stride > 0 else None, stride)]
        x = x.index_select(dim, torch.tensor(list(picked), dtype=torch.int64))
    return x


@computes("index_select", "Gather")
def _gather(x: Tensor, index: Tensor, *, axis: int = 0) -> Tensor:
    axis %= x.dim()
    flat = index.flatten().long()
    picked = x.index_select(axis, torch.where(flat < 0, flat + x.shape[axis], flat))
    return picked.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


@computes("gather", "GatherElements")
def _gather_elements(x: Tensor, index: Tensor, *, axis: int = 0) -> Tensor:
    return x.gather(axis, _positive(index, x.shape[axis]))


@computes("gather", "GatherND")
def _gather_nd(x: Tensor, index: Tensor, *, batch_dims: int = 0) -> Tensor:
    batch = x.shape[:batch_dims]
    places = torch.cartesian_prod(*(torch.arange(size) for size in batch)) if batch_dims else torch.zeros(1, 0)
    places = places.reshape(math.prod(batch), batch_dims).long()
    rows = index.reshape(math.prod(batch), -1, index.shape[-1]).long()
    results = []
    for place, row in zip(places, rows, strict=True):
        part = x[tuple(place.tolist())]
        results.append(part[tuple(_positive(column, part.shape[i]) for i, column in enumerate(row.unbind(-1)))])
    inner = x.shape[batch_dims + index.shape[-1] :]
    shape = (*index.shape[:-1], *inner)
    return torch.stack(results).reshape(shape) if results else x.new_empty(shape)


def _positive(index: Tensor, size: int) -> Tensor:
    index = index.long()
    return torch.where(index < 0, index + size, index)


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@computes("scatter", "ScatterElements", "Scatter")
def _scatter(x: Tensor, index: Tensor, source: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    index = _positive(index, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, index, source)
    return x.scatter_reduce(axis, index, source, _REDUCTIONS[reduction])


@computes("index_put", "ScatterND")
def _scatter_nd(x: Tensor, index: Tensor, source: Tensor, *, reduction: str = "none") -> Tensor:
    depth = index.shape[-1]
    rows = index.reshape(-1, depth).long()
    place = torch.zeros(len(rows), dtype=torch.int64)
    for i in range(depth):
        place = place * x.shape[i] + _positive(rows[:, i], x.shape[i])
    flat = x.reshape(math.prod(x.shape[:depth]), -1)
    new = source.reshape(len(rows), flat.shape[1])
    if reduction == "none":
        return flat.index_copy(0, place, new).reshape(x.shape)
    wide = place[:, None].expand(new.shape)
    return flat.scatter_reduce(0, wide, new, _REDUCTIONS[reduction]).reshape(x.shape)


@computes("pad", "Pad")
def _pad(
    x: Tensor,
    amounts: Tensor | None = None,
    fill: Tensor | None = None,
    where: Tensor | None = None,
    *,
    mode: str = "constant",
    pads: list[int] | None = None,
    value: float = 0.0,
) -> Tensor:
    sizes = integers(amounts, pads)
    dims = [dim % x.dim() for dim in integers(where, list(range(x.dim())))]
    filling = x.new_full((), value) if fill is None or not fill.numel() else fill.reshape(()).to(x.dtype)
    for dim, before, after in zip(dims, sizes[: len(dims)], sizes[len(dims) :], strict=True):
        size = x.shape[dim]
        picked = torch.arange(-before, size + after)
        outside = (picked < 0) | (picked >= size)
        if mode == "reflect" and size > 1:
            picked = size - 1 - (picked % (2 * size - 2) - (size - 1)).abs()
        elif mode == "wrap":
            picked = picked % size
        if not size:
            x = filling.expand([len(picked) if i == dim else other for i, other in enumerate(x.shape)])
            continue
        x = x.index_select(dim, picked.clamp(0, size - 1))
        if mode == "constant":
            x = torch.where(outside.reshape([-1 if i == dim else 1 for i in range(x.dim())]), filling, x)
    return x.clone()


@translation("ConstantOfShape")
def _constant_of_shape(node: OnnxNode) -> Call:
    value = node.attribute("value", torch.zeros(1))
    number, dtype = scalar(value), value.dtype
    return OnnxFunction(_full, "full"), (node.inputs[0],), {"value": number, "dtype": dtype}


def _full(shape: Tensor, *, value: Any, dtype: torch.dtype) -> Tensor:
    return torch.full(integers(shape), value, dtype=dtype)


def _numbers(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.flatten().tolist())


NUMBERS = OnnxFunction(_numbers, "numbers")
"""Numbers that sizes depend on, out of a tensor: they do not round."""


@translation("Range")
def _range(node: OnnxNode) -> Call:
    arguments = tuple(node.helper(NUMBERS, value) for value in node.inputs)
    return OnnxFunction(_counted, "arange"), arguments, {"dtype": torch_dtype(node.element_type(0))}


def _counted(start: Any, limit: Any, delta: Any, *, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:  # inside of a graph whose types are not known
        numbers = (start[0], limit[0], delta[0])
        dtype = torch.float32 if any(isinstance(number, float) for number in numbers) else torch.int64
    number = max(0, math.ceil((limit[0] - start[0]) / delta[0]))
    exact = torch.float64 if dtype.is_floating_point else torch.int64
    found: Tensor = start[0] + torch.arange(number, dtype=exact) * delta[0]
    return found.to(dtype)


@computes("tril", "Trilu")
def _trilu(x: Tensor, offset: Tensor | None = None, *, upper: int = 1) -> Tensor:
    k = 0 if offset is None else int(offset)
    return x.triu(k) if upper else x.tril(k)


@computes("nonzero", "NonZero")
def _nonzero(x: Tensor) -> Tensor:
    return x.nonzero().T.contiguous()


@computes("one_hot", "OneHot")
def _one_hot(index: Tensor, depth: Tensor, values: Tensor, *, axis: int = -1) -> Tensor:
    size = int(scalar(depth))
    where = index.long()
    where = torch.where(where < 0, where + size, where).unsqueeze(axis)
    axis = axis % where.dim()
    shape = [size if i == axis else 1 for i in range(where.dim())]
    return torch.where(torch.arange(size).reshape(shape) == where, values[1], values[0])


@computes("pixel_shuffle", "DepthToSpace")
def _depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    parts = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


@computes("pixel_unshuffle", "SpaceToDepth")
def _space_to_depth(x: Tensor, *, blocksize: int) -> Tensor:
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


@translation("TopK")
def _topk(node: OnnxNode) -> Call:
    options = {name: node.attribute(name, 1) for name in ("largest", "sorted")}
    arguments = (*node.inputs[:1], node.input(1), node.attribute("axis", -1))
    return OnnxFunction(_top, "topk"), arguments, {"k": node.attribute("k"), **options}


def _top(
    x: Tensor, number: Tensor | None, dim: int, *, k: int | None, largest: int, sorted: int
) -> tuple[Tensor, Tensor]:
    size = int(scalar(number)) if number is not None else int(k or 0)
    # Of equal values the one with the lower index comes first.
    order = torch.argsort(x, dim=dim, descending=bool(largest), stable=True).narrow(dim, 0, size)
    return x.gather(dim, order), order


@translation("ArgMax", "ArgMin")
def _arg(node: OnnxNode) -> Call:
    name = node.proto.op_type.lower()
    options = {"keepdim": node.attribute("keepdims", 1), "last": node.attribute("select_last_index", 0)}
    return OnnxFunction(_ARG[name], name), (node.inputs[0], node.attribute("axis", 0)), options


def _place_of(name: str) -> Callable[..., Tensor]:
    find: Callable[..., Tensor] = getattr(torch, name)

    def place(x: Tensor, dim: int, *, keepdim: int, last: int) -> Tensor:
        if last:
            return x.shape[dim] - 1 - find(x.flip(dim), dim, keepdim=bool(keepdim))
        return find(x, dim, keepdim=bool(keepdim))

    return place


_ARG = {name: _place_of(name) for name in ("argmax", "argmin")}


@translation("Split", "SplitToSequence")
def _split(node: OnnxNode) -> Call:
    if node.proto.op_type != "Split":
        raise NotImplementedError("sequences")
    options = {"split": node.attribute("split"), "axis": node.attribute("axis", 0), "parts": len(node.proto.output)}
    return OnnxFunction(_parts, "split"), (node.inputs[0], node.input(1)), options


def _parts(x: Tensor, sizes: Tensor | None, *, split: list[int] | None, axis: int, parts: int) -> tuple[Tensor, ...]:
    wanted = integers(sizes, split)
    if wanted is None:
        each = -(-x.shape[axis] // parts)
        wanted = [min(each, max(0, x.shape[axis] - i * each)) for i in range(parts)]
    return tuple(part.clone() for part in torch.split(x, wanted, axis))


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
