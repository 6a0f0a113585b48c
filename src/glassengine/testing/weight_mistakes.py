"""Kinds of mistake in weights, and losses of precision: less than the dtype of the program promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.program.naming import op_name
from glassengine.testing.edits import DoesNotApply, Edit, Mistake
from glassengine.testing.mistakes import aten, product


def _matrix(change: Callable[[Edit, Tensor], Tensor]) -> Callable[[Edit], None]:
    """Change the matrix of one product."""

    def edit(e: Edit) -> None:
        name = e.weight_of(product(e), dims=2)
        value = e.value_of(name)
        e.weights[name] = change(e, value).to(value.dtype).contiguous()

    return edit


def _vector(change: Callable[[Edit, Tensor], Tensor]) -> Callable[[Edit], None]:
    """Change a bias or the gain of a norm."""

    def edit(e: Edit) -> None:
        used = e.find("mul", "add", "addmm", "linear", "layer_norm", "batch_norm")
        vectors = []
        for node in used:
            try:
                vectors.append(e.weight_of(node, dims=1))
            except DoesNotApply:
                continue
        if not vectors:
            raise DoesNotApply
        name = e.random.choice(vectors)
        e.weights[name] = change(e, e.value_of(name))

    return edit


def _at(e: Edit, value: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """Change one element that is neither the largest nor tiny."""
    flat = value.flatten()
    order = flat.abs().argsort(descending=True)
    index = int(order[e.random.randrange(len(flat) // 8, len(flat) // 3)])
    flat[index] = change(flat[index])
    return flat.reshape(value.shape)


def _row(e: Edit, value: Tensor, factor: float) -> Tensor:
    value[e.random.randrange(value.shape[0])] *= factor
    return value


def _quantised(value: Tensor, levels: int) -> Tensor:
    scale = value.float().abs().amax(-1, keepdim=True).clamp(min=1e-9) / levels
    return (value.float() / scale).round() * scale


def transposed(e: Edit) -> None:
    """A square matrix is stored the other way round."""
    names = e.program.weight_names()
    square = [
        node
        for node in e.find("linear", "addmm", "mm")
        if any(
            s.name in names and s.meta["val"].dim() == 2 and s.meta["val"].shape[0] == s.meta["val"].shape[1]
            for s in node.all_input_nodes
        )
    ]
    name = e.weight_of(e.one(square), dims=2)
    e.weights[name] = e.value_of(name).T.contiguous()


def other_weight(e: Edit) -> None:
    """A matrix of the same shape from elsewhere, another layer perhaps."""
    name = e.weight_of(product(e), dims=2)
    shape = e.value_of(name).shape
    others = [other for other, value in e.program.exported.state_dict.items() if other != name and value.shape == shape]
    if not others:
        raise DoesNotApply
    e.weights[name] = e.value_of(e.random.choice(others))


def rope_base(e: Edit) -> None:
    names = [name for name in e.program.weight_names().values() if name.endswith("inv_freq") and "original" not in name]
    if not names:
        raise DoesNotApply
    e.weights[names[0]] = e.value_of(names[0]) * 0.99


def embedding_shifted(e: Edit) -> None:
    name = e.weight_of(e.one(e.find("embedding")), dims=2)
    e.weights[name] = e.value_of(name).roll(1, 0)


def kernel_flipped(e: Edit) -> None:
    name = e.weight_of(e.one(e.find("conv1d", "conv2d", "convolution")))
    e.weights[name] = e.value_of(name).flip(-1)


def statistics_stale(e: Edit) -> None:
    names = [name for name in e.program.weight_names().values() if name.endswith(("running_mean", "running_var"))]
    if not names:
        raise DoesNotApply
    name = e.random.choice(names)
    e.weights[name] = e.value_of(name) * 1.05 + 0.01


WEIGHT_MISTAKES = tuple(
    Mistake(name, "weights", edit)
    for name, edit in (
        ("weight_transposed", transposed),
        ("weight_of_another", other_weight),
        ("weight_exponent_bit", _matrix(lambda e, w: _at(e, w, lambda x: x * 4))),
        ("weight_sign_flip", _matrix(lambda e, w: _at(e, w, lambda x: -x))),
        ("weight_nan", _matrix(lambda e, w: _at(e, w, lambda x: float("nan")))),
        ("weight_row_zero", _matrix(lambda e, w: _row(e, w, 0.0))),
        ("weight_row_x1.01", _matrix(lambda e, w: _row(e, w, 1.01))),
        ("weight_x1.001", _matrix(lambda e, w: w.float() * 1.001)),
        ("weight_x1.01", _matrix(lambda e, w: w.float() * 1.01)),
        ("weight_zero", _matrix(lambda e, w: w * 0)),
        ("weight_rows_swapped", _matrix(lambda e, w: w.roll(1, 0))),
        ("weight_stale", _matrix(lambda e, w: w + 0.02 * w.roll(1, 0).roll(1, 1))),
        ("weight_int4", _matrix(lambda e, w: _quantised(w, 7))),
        ("weight_int8", _matrix(lambda e, w: _quantised(w, 127))),
        ("vector_x1.05", _vector(lambda e, w: w * 1.05)),
        ("vector_one_element", _vector(lambda e, w: _at(e, w, lambda x: x * 1.25))),
        ("rope_base", rope_base),
        ("embedding_shifted", embedding_shifted),
        ("kernel_flipped", kernel_flipped),
        ("statistics_stale", statistics_stale),
    )
)


# Precision


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _through(dtype: torch.dtype) -> Callable[[Edit, Node], Node]:
    def make(e: Edit, x: Node) -> Node:
        if torch.finfo(_dtype(x)).eps >= torch.finfo(dtype).eps:
            raise DoesNotApply
        return e.call(aten._to_copy.default, e.call(aten._to_copy.default, x, dtype=dtype), dtype=_dtype(x))

    return make


def _truncated(e: Edit, x: Node, mask: int) -> Node:
    """Cut mantissa bits of a float32 value off."""
    bits = e.call(aten.bitwise_and.Scalar, e.call(aten.view.dtype, x, torch.int32), mask)
    return e.call(aten.view.dtype, bits, torch.float32)


def _operand(make: Callable[[Edit, Node], Node]) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        node = product(e)
        e.feed(node, 1 if op_name(node) == "addmm" else 0, lambda x: make(e, x))

    return edit


def _tf32(e: Edit, x: Node) -> Node:
    if _dtype(x) is not torch.float32:
        raise DoesNotApply
    return _truncated(e, x, -(1 << 13))


def cast_truncates(e: Edit) -> None:
    """A product is rounded towards zero instead of to nearest."""
    node = product(e)
    dtype = _dtype(node)
    if dtype is torch.float32 or op_name(node) != "linear":
        raise DoesNotApply

    def make() -> Node:
        wide = [e.call(aten._to_copy.default, arg, dtype=torch.float32) for arg in node.args]
        exact = e.call(aten.linear.default, *wide)
        cut = _truncated(e, exact, -(1 << (16 if dtype is torch.bfloat16 else 13)))
        return e.call(aten._to_copy.default, cut, dtype=dtype)

    e.replace(node, make)


def _island(dtype: torch.dtype) -> Callable[[Edit], None]:
    """A value that the model computes in float32 on purpose goes through a lower precision."""

    def edit(e: Edit) -> None:
        node = e.one(e.find("rsqrt", "mean", "softmax", "_softmax", "cos", where=lambda n: _dtype(n) is torch.float32))
        e.rewrite(node, lambda x: _through(dtype)(e, x))

    return edit


def sum_in_halves(e: Edit) -> None:
    """A product is accumulated in the half precision of the program instead of float32."""
    node = product(e)
    if _dtype(node) is torch.float32 or op_name(node) != "linear" or len(node.args) > 2:
        raise DoesNotApply
    x, weight = node.args[:2]
    size = int(weight.meta["val"].shape[1])  # type: ignore[union-attr]

    def make() -> Node:
        total: Node | None = None
        for start in range(0, size, 4):
            parts = [e.call(aten.slice.Tensor, side, -1, start, start + 4) for side in (x, weight)]
            part = e.call(aten.linear.default, *parts)
            total = part if total is None else e.call(aten.add.Tensor, total, part)
        assert total is not None
        return total

    e.replace(node, make)


PRECISION_LOSSES = tuple(
    Mistake(name, "precision", edit)
    for name, edit in (
        ("operand_bfloat16", _operand(_through(torch.bfloat16))),
        ("operand_float16", _operand(_through(torch.float16))),
        ("operand_tf32", _operand(_tf32)),
        ("operand_float8", _operand(_through(torch.float8_e4m3fn))),
        ("cast_truncates", cast_truncates),
        ("island_bfloat16", _island(torch.bfloat16)),
        ("island_float16", _island(torch.float16)),
        ("sum_in_halves", sum_in_halves),
    )
)
