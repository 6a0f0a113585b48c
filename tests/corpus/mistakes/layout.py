"""Kinds of mistake in residuals, sums, layout, and in the routing of experts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from glassengine.program.representation.naming import op_name
from tests.corpus.edits import DoesNotApply, Edit, Mistake, Op
from tests.corpus.places import (
    aten,
    inputs_of,
    is_float,
    num_dims,
    product,
    residual,
)

# Residuals, sums, layout


def _residual_dropped(e: Edit) -> None:
    e.replace(node := residual(e), lambda: e.call(aten.clone.default, inputs_of(node)[1]))


def _layer_skipped(e: Edit) -> None:
    e.replace(node := residual(e), lambda: e.call(aten.clone.default, inputs_of(node)[0]))


def _residual_twice(e: Edit) -> None:
    e.rewrite(node := residual(e), lambda x: e.call(aten.add.Tensor, x, inputs_of(node)[0]))


def _subtracted(e: Edit) -> None:
    e.replace(node := residual(e), lambda: e.call(aten.sub.Tensor, *inputs_of(node)))


def _residual_from_norm(e: Edit) -> None:
    """The residual is taken after the norm instead of before it."""
    node = residual(e)
    shape = node.meta["val"].shape
    order = list(e.graph.nodes)
    before = order[: order.index(node)]
    candidates = [n for n in before if op_name(n) in ("mul", "layer_norm") and n.meta["val"].shape == shape]
    same = [n for n in candidates if n.meta["val"].dtype is node.meta["val"].dtype]
    if not same:
        raise DoesNotApply
    node.update_arg(0, same[-1])


def _factor(factor: float) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        e.rewrite(product(e), lambda x: e.call(aten.mul.Tensor, x, factor))

    return edit


def _bias_dropped(e: Edit) -> None:
    node = e.one(e.find("addmm", "linear", where=lambda n: op_name(n) == "addmm" or len(n.args) > 2))
    if op_name(node) == "addmm":
        node.kwargs = {**node.kwargs, "beta": 0}
    else:
        node.args = node.args[:2]


def _last_token_lost(e: Edit) -> None:
    def make(x: Op) -> Op:
        return e.call(aten.constant_pad_nd.default, e.call(aten.slice.Tensor, x, 1, 0, -1), [0, 0, 0, 1], 0.0)

    node = e.one(e.find("linear", "add", "mul", where=lambda n: is_float(n) and num_dims(n) == 3))
    e.rewrite(node, make)


def _tokens_shifted(e: Edit) -> None:
    node = e.one(e.find("linear", "add", "mul", where=lambda n: is_float(n) and num_dims(n) == 3))
    e.rewrite(node, lambda x: e.call(aten.roll.default, x, [1], [1]))


def _rows_of_batch_swapped(e: Edit) -> None:
    node = e.one(e.find("linear", "add", "mul", where=lambda n: is_float(n) and num_dims(n) >= 3))
    e.rewrite(node, lambda x: e.call(aten.roll.default, x, [1], [0]))


def _slice_shifted(e: Edit) -> None:
    def is_inner(node: Op) -> bool:
        size = inputs_of(node)[0].meta["val"].shape[node.args[1]]
        return is_float(node) and len(node.args) > 3 and isinstance(size, int) and 0 < node.args[3] < size

    node = e.one(e.find("slice", where=is_inner))
    node.args = (*node.args[:2], node.args[2] + 1, node.args[3] + 1, *node.args[4:])


def _concat_order(e: Edit) -> None:
    def mixed(node: Op) -> bool:
        sources = node.args[0]
        return len(set(sources)) > 1 and len({str(s.meta["val"].shape) for s in sources}) == 1

    node = e.one(e.find("cat", where=lambda n: is_float(n) and mixed(n)))
    e.replace(node, lambda: e.call(aten.cat.default, list(reversed(node.args[0])), *node.args[1:]))


def _split_order(e: Edit) -> None:
    """Parts of one product (query and key, gate and up) are taken in the wrong order."""
    node = e.one(e.find("split", "split_with_sizes", "chunk"))
    parts = [user for user in node.users if user.args[0] is node]
    same = [
        (a, b) for a in parts for b in parts if a.args[1] < b.args[1] and a.meta["val"].shape == b.meta["val"].shape
    ]
    if not same:
        raise DoesNotApply
    a, b = same[0]
    first, second = a.args[1], b.args[1]
    a.update_arg(1, second)
    b.update_arg(1, first)


def _dropout_active(e: Edit) -> None:
    """Some elements are lost, the rest is scaled up; which ones is a function of the values."""

    def make(x: Op) -> Op:
        kept = e.call(aten.gt.Scalar, e.call(aten.cos.default, e.call(aten.mul.Tensor, x, 977.0)), -0.9)
        return e.call(aten.mul.Tensor, e.call(aten.mul.Tensor, x, kept), 1 / 0.86)

    e.rewrite(product(e), make)


def _not_a_number(e: Edit) -> None:
    """The largest element becomes NaN."""

    def make(x: Op) -> Op:
        largest = e.call(aten.eq.Tensor, x, e.call(aten.amax.default, x))
        return e.call(aten.masked_fill.Scalar, x, largest, math.nan)

    e.rewrite(product(e), make)


def _overflow(e: Edit) -> None:
    """An intermediate is kept in float16 on the way, scaled so that it does not fit."""

    def make(x: Op) -> Op:
        dtype = x.meta["val"].dtype if "val" in x.meta else None
        large = e.call(aten._to_copy.default, e.call(aten.mul.Tensor, x, 32768.0), dtype=torch.float16)
        back = e.call(aten._to_copy.default, large, dtype=torch.float32)
        small = e.call(aten.mul.Tensor, back, 1 / 32768.0)
        return e.call(aten._to_copy.default, small, dtype=dtype)

    e.rewrite(product(e), make)


# Experts


def _router(e: Edit, op: str) -> Op:
    if not e.find("topk"):
        raise DoesNotApply
    return e.one(e.find(op))


def _router_not_renormalized(e: Edit) -> None:
    e.replace(node := _router(e, "div"), lambda: e.call(aten.clone.default, node.args[0]))


def _expert_shifted(e: Edit) -> None:
    topk = _router(e, "topk")
    node = e.one(user for user in topk.users if user.args[1] == 1)
    number = int(inputs_of(topk)[0].meta["val"].shape[-1])
    e.rewrite(node, lambda x: e.call(aten.remainder.Scalar, e.call(aten.add.Tensor, x, 1), number))


def _router_not_normalised(e: Edit) -> None:
    _router(e, "topk")
    node = e.one(e.find("softmax", "_softmax"))
    e.replace(
        node, lambda: e.call(aten.sigmoid.default, e.call(aten._to_copy.default, node.args[0], dtype=torch.float32))
    )


LAYOUT_MISTAKES = tuple(
    Mistake(name, "graph", edit)
    for name, edit in (
        ("residual_dropped", _residual_dropped),
        ("layer_skipped", _layer_skipped),
        ("residual_twice", _residual_twice),
        ("subtracted", _subtracted),
        ("residual_from_norm", _residual_from_norm),
        ("factor_1.001", _factor(1.001)),
        ("factor_1.01", _factor(1.01)),
        ("bias_dropped", _bias_dropped),
        ("last_token_lost", _last_token_lost),
        ("tokens_shifted", _tokens_shifted),
        ("rows_of_batch_swapped", _rows_of_batch_swapped),
        ("slice_shifted", _slice_shifted),
        ("concat_order", _concat_order),
        ("split_order", _split_order),
        ("dropout_active", _dropout_active),
        ("not_a_number", _not_a_number),
        ("overflow", _overflow),
        ("router_not_renormalized", _router_not_renormalized),
        ("expert_shifted", _expert_shifted),
        ("router_not_normalised", _router_not_normalised),
    )
)
