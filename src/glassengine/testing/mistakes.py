"""Kinds of mistake in a graph: positions, caches, masks, attention, norms, activations, residuals, layout.

Each looks for its place by what the graph says (an op, its arguments, its neighbours), so it applies to any model that
has such a place. Weights and precision: `weight_mistakes`. From a seed: `random_mistakes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from glassengine.program.naming import op_name
from glassengine.testing.edits import DoesNotApply, Edit, Mistake

aten = torch.ops.aten
_END = 9223372036854775807


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _dims(node: Node) -> int:
    return int(node.meta["val"].dim())


def _inputs(node: Node) -> list[Node]:
    return [arg for arg in node.args if isinstance(arg, Node)]


def _literal(node: Node) -> float | None:
    found = [arg for arg in node.args if isinstance(arg, float)]
    return found[0] if found else None


def _comes_from(node: Node, *ops: str) -> bool:
    return any(op_name(source) in ops for source in _inputs(node))


def _feeds(node: Node, *ops: str) -> bool:
    return any(op_name(user) in ops for user in node.users)


def attention(e: Edit) -> Node:
    """One attention."""
    return e.one(e.find("scaled_dot_product_attention"))


def product(e: Edit) -> Node:
    """One product with a weight."""
    return e.one(e.find("linear", "addmm", "mm", where=lambda node: _is_float(node)))


def residual(e: Edit) -> Node:
    """One sum of two hidden states of the same shape, neither of them small."""

    def is_residual(node: Node) -> bool:
        sources = _inputs(node)
        same = (
            len(sources) == 2
            and _is_float(node)
            and all(_is_float(s) and s.meta["val"].shape == node.meta["val"].shape for s in sources)
        )
        return same and _dims(node) == 3 and not _comes_from(node, "mul")

    return e.one(e.find("add", where=is_residual))


def is_epsilon(node: Node) -> bool:
    """Whether `node` adds the small number under a root."""
    literal = _literal(node)
    return literal is not None and 0 < literal < 1e-3 and _is_float(node)


# Positions


def rope_sign(e: Edit) -> None:
    e.replace(node := e.one(e.find("neg", where=_is_float)), lambda: e.call(aten.clone.default, node.args[0]))


def rope_half(e: Edit) -> None:
    node = e.one(e.find("cat", where=lambda n: _is_float(n) and any(op_name(s) == "neg" for s in n.args[0])))
    e.replace(node, lambda: e.call(aten.cat.default, list(reversed(node.args[0])), -1))


def rope_interleaved(e: Edit) -> None:
    node = e.one(e.find("cat", where=lambda n: _is_float(n) and any(op_name(s) == "neg" for s in n.args[0])))
    source = node.args[0][1].args[0]  # type: ignore[union-attr, index]

    def make() -> Node:
        even, odd = (e.call(aten.slice.Tensor, source, -1, start, _END, 2) for start in (0, 1))
        pairs = e.call(aten.stack.default, [e.call(aten.neg.default, odd), even], -1)
        return e.call(aten.flatten.using_ints, pairs, -2, -1)

    e.replace(node, make)


def sine_for_cosine(e: Edit) -> None:
    node = e.one(e.find("cos"))
    e.replace(node, lambda: e.call(aten.sin.default, node.args[0]))


def _positions(e: Edit) -> Node:
    return e.one(e.find("_to_copy", where=lambda n: _is_float(n) and n.args[0].meta["val"].dtype is torch.int64))  # type: ignore[union-attr]


def positions_shifted(e: Edit) -> None:
    e.feed(_positions(e), 0, lambda x: e.call(aten.add.Tensor, x, 1))


def positions_late(e: Edit) -> None:
    def make(x: Node) -> Node:
        late = e.call(aten.ge.Scalar, x, 12)
        return e.call(aten.add.Tensor, x, e.call(aten._to_copy.default, late, dtype=torch.int64))

    e.feed(_positions(e), 0, make)


def position_table_shifted(e: Edit) -> None:
    """Learned positions are looked up one row too far."""
    node = e.one(e.find("embedding", where=lambda n: n.args[1].meta["val"].dtype is torch.int64))  # type: ignore[union-attr]
    last = int(node.args[0].meta["val"].shape[0]) - 1  # type: ignore[union-attr]
    e.feed(node, 1, lambda x: e.call(aten.clamp_max.default, e.call(aten.add.Tensor, x, 1), last))


def key_not_rotated(e: Edit) -> None:
    node = e.one(e.find("add", where=lambda n: _is_float(n) and _feeds(n, "index_copy")))
    e.replace(node, lambda: e.call(aten.clone.default, _inputs(_inputs(node)[0])[0]))


# Cache


def _written(e: Edit) -> Node:
    return e.one(e.find("index_copy"))


def _is_decode(e: Edit, copy: Node) -> Node:
    first = e.call(aten.select.int, copy.args[2], 0, 0)
    return e.call(aten.gt.Scalar, first, 0)


def cache_wrong_slot(e: Edit) -> None:
    e.feed(_written(e), 2, lambda x: e.call(aten.clamp_min.default, e.call(aten.sub.Tensor, x, 1), 0))


def cache_slots_reversed(e: Edit) -> None:
    e.feed(_written(e), 2, lambda x: e.call(aten.flip.default, x, [0]))


def cache_never_written(e: Edit) -> None:
    e.replace(node := _written(e), lambda: e.call(aten.clone.default, node.args[0]))


def cache_not_written_in_decode(e: Edit) -> None:
    node = _written(e)
    e.rewrite(node, lambda new: e.call(aten.where.self, _is_decode(e, node), node.args[0], new))


def cache_stale_in_decode(e: Edit) -> None:
    """The newest entry is half of what it should be, once there is a cache."""
    node = _written(e)

    def make(x: Node) -> Node:
        return e.call(aten.where.self, _is_decode(e, node), e.call(aten.mul.Tensor, x, 0.5), x)

    e.feed(node, 3, make)


def keys_as_values(e: Edit) -> None:
    node = attention(e)
    node.args = (node.args[0], node.args[2], node.args[1], *node.args[3:])


# Masks


def _causal(e: Edit) -> Node:
    return e.one(e.find("le", "lt", "ge", "gt", where=lambda n: len(_inputs(n)) == 2))


def mask_sees_one_more(e: Edit) -> None:
    e.feed(_causal(e), 1, lambda x: e.call(aten.add.Tensor, x, 1))


def mask_hides_newest(e: Edit) -> None:
    e.feed(_causal(e), 1, lambda x: e.call(aten.sub.Tensor, x, 1))


def causal_missing(e: Edit) -> None:
    e.rewrite(_causal(e), lambda x: e.call(aten.logical_or.default, x, e.call(aten.logical_not.default, x)))


def padding_ignored(e: Edit) -> None:
    node = e.one(e.find("index", where=lambda n: n.meta["val"].dtype is torch.bool))
    e.rewrite(node, lambda x: e.call(aten.logical_or.default, x, e.call(aten.logical_not.default, x)))


def mask_dropped(e: Edit) -> None:
    node = attention(e)
    if len(node.args) < 4 or node.args[3] is None:
        raise DoesNotApply
    node.args = (*node.args[:3], None, *node.args[4:])


# Attention


def _scaled(factor: Callable[[float], float]) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        node = attention(e)
        size = int(node.args[0].meta["val"].shape[-1])  # type: ignore[union-attr]
        scale = node.kwargs.get("scale") or size**-0.5
        node.kwargs = {**node.kwargs, "scale": factor(float(scale))}  # type: ignore[arg-type]

    return edit


def heads_reversed(e: Edit) -> None:
    e.feed(attention(e), 0, lambda x: e.call(aten.flip.default, x, [1]))


def heads_rolled(e: Edit) -> None:
    e.feed(attention(e), 2, lambda x: e.call(aten.roll.default, x, [1], [1]))


def view_for_transpose(e: Edit) -> None:
    def has_view(node: Node) -> bool:
        source = node.args[0]
        return node.args[1:] == (1, 2) and isinstance(source, Node) and op_name(source) == "view" and _dims(node) == 4

    node = e.one(e.find("transpose", where=has_view))
    sizes = list(node.args[0].args[1])  # type: ignore[union-attr, arg-type]
    sizes[1], sizes[2] = sizes[2], sizes[1]
    contiguous = torch.contiguous_format
    e.replace(
        node,
        lambda: e.call(aten.view.default, e.call(aten.clone.default, node.args[0], memory_format=contiguous), sizes),
    )


def repeat_order(e: Edit) -> None:
    """Heads of keys and values are tiled instead of repeated."""

    def is_repeat(node: Node) -> bool:
        shape = node.meta["val"].shape
        return len(shape) == 5 and shape[1] == shape[2] and shape[1] != 1

    e.rewrite(e.one(e.find("expand", where=is_repeat)), lambda x: e.call(aten.transpose.int, x, 1, 2))


def softmax_wrong_dim(e: Edit) -> None:
    node = e.one(e.find("softmax", "_softmax", where=_is_float))
    node.update_arg(1, -2)


def value_zero_first(e: Edit) -> None:
    """The first key is never seen."""

    def make(value: Node) -> Node:
        rest = e.call(aten.slice.Tensor, value, 2, 1, _END)
        return e.call(aten.constant_pad_nd.default, rest, [0, 0, 1, 0], 0.0)

    e.feed(attention(e), 2, make)


# Norms


def _epsilon(factor: float) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        node = e.one(e.find("add", where=is_epsilon))
        node.args = tuple(arg * factor if isinstance(arg, float) else arg for arg in node.args)

    return edit


def _layer_norm_epsilon(factor: float) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        node = e.one(e.find("layer_norm", "native_layer_norm"))
        node.update_arg(4, float(node.args[4]) * factor)  # type: ignore[arg-type]

    return edit


def epsilon_outside(e: Edit) -> None:
    node = e.one(e.find("rsqrt", where=lambda n: is_epsilon(_inputs(n)[0])))
    inside, epsilon = _inputs(_inputs(node)[0])[0], _literal(_inputs(node)[0])

    def make() -> Node:
        root = e.call(aten.add.Tensor, e.call(aten.sqrt.default, inside), epsilon)
        return e.call(aten.reciprocal.default, root)

    e.replace(node, make)


def _mean(e: Edit) -> Node:
    return e.one(e.find("mean", where=lambda n: n.args[1] == [-1]))


def mean_over_one_less(e: Edit) -> None:
    node = _mean(e)
    size = int(_inputs(node)[0].meta["val"].shape[-1])
    e.rewrite(node, lambda x: e.call(aten.mul.Tensor, x, size / (size - 1)))


def mean_wrong_dim(e: Edit) -> None:
    """The mean over the tokens of a prompt instead of over the channels, in a place where both fit."""
    node = e.one(e.find("mean", where=lambda n: n.args[1] == [-1] and len(n.args) > 2 and bool(n.args[2])))

    def make() -> Node:
        mean = e.call(aten.mean.dim, node.args[0], [-2], True)
        return e.call(aten.mean.dim, e.call(aten.expand_as.default, mean, node.args[0]), [-1], True)

    e.replace(node, make)


def reciprocal_missing(e: Edit) -> None:
    node = e.one(e.find("rsqrt"))
    e.replace(node, lambda: e.call(aten.sqrt.default, node.args[0]))


def gain_plus_one(e: Edit) -> None:
    node = _gain(e)
    other = next(source for source in _inputs(node) if source.op == "call_function")
    e.rewrite(node, lambda x: e.call(aten.add.Tensor, x, other))


def gain_dropped(e: Edit) -> None:
    node = _gain(e)
    other = next(source for source in _inputs(node) if source.op == "call_function")
    e.replace(node, lambda: e.call(aten.clone.default, other))


def _gain(e: Edit) -> Node:
    weights = e.program.weight_names()
    return e.one(
        e.find(
            "mul",
            where=lambda n: (
                len(_inputs(n)) == 2
                and any(s.name in weights for s in _inputs(n))
                and any(s.op == "call_function" for s in _inputs(n))
            ),
        )
    )


def norm_skipped(e: Edit) -> None:
    node = e.one(e.find("mul", where=lambda n: _comes_from(n, "rsqrt") and len(_inputs(n)) == 2))
    e.replace(node, lambda: e.call(aten.clone.default, _inputs(node)[0]))


def layer_norm_not_centred(e: Edit) -> None:
    node = e.one(e.find("layer_norm"))
    e.feed(node, 0, lambda x: e.call(aten.abs.default, x))


# Activations


def _instead(name: str, target: Any, **kwargs: Any) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        node = e.one(e.find(name, where=_is_float))
        e.replace(node, lambda: e.call(target, node.args[0], **kwargs))

    return edit


def gelu_other_form(e: Edit) -> None:
    node = e.one(e.find("gelu"))
    node.kwargs = {} if node.kwargs.get("approximate") == "tanh" else {"approximate": "tanh"}


def silu_steeper(e: Edit) -> None:
    e.feed(e.one(e.find("silu")), 0, lambda x: e.call(aten.mul.Tensor, x, 1.01))


def _literal_times(factor: float) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        def has_constant(node: Node) -> bool:
            literal = _literal(node)
            return literal not in (None, 1.0) and _is_float(node) and not is_epsilon(node)

        node = e.one(e.find("mul", "add", "pow", "div", "sub", where=has_constant))
        node.args = tuple(arg * factor if isinstance(arg, float) else arg for arg in node.args)

    return edit


def gate_up_swapped(e: Edit) -> None:
    node = e.one(e.find("linear", where=lambda n: _feeds(n, "silu", "gelu", "relu")))
    source = node.args[0]
    shape = node.args[1].meta["val"].shape  # type: ignore[union-attr]
    other = e.one(
        n
        for n in source.users  # type: ignore[union-attr]
        if n is not node and op_name(n) == "linear" and n.args[0] is source and n.args[1].meta["val"].shape == shape
    )
    ours, theirs = node.args[1], other.args[1]
    node.update_arg(1, theirs)
    other.update_arg(1, ours)


def clamp_added(e: Edit) -> None:
    e.rewrite(product(e), lambda x: e.call(aten.clamp.default, x, -1.5, 1.5))


# Residuals, sums, layout


def residual_dropped(e: Edit) -> None:
    e.replace(node := residual(e), lambda: e.call(aten.clone.default, _inputs(node)[1]))


def layer_skipped(e: Edit) -> None:
    e.replace(node := residual(e), lambda: e.call(aten.clone.default, _inputs(node)[0]))


def residual_twice(e: Edit) -> None:
    e.rewrite(node := residual(e), lambda x: e.call(aten.add.Tensor, x, _inputs(node)[0]))


def subtracted(e: Edit) -> None:
    e.replace(node := residual(e), lambda: e.call(aten.sub.Tensor, *_inputs(node)))


def residual_from_norm(e: Edit) -> None:
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


def bias_dropped(e: Edit) -> None:
    node = e.one(e.find("addmm", "linear", where=lambda n: op_name(n) == "addmm" or len(n.args) > 2))
    if op_name(node) == "addmm":
        node.kwargs = {**node.kwargs, "beta": 0}
    else:
        node.args = node.args[:2]


def last_token_lost(e: Edit) -> None:
    def make(x: Node) -> Node:
        return e.call(aten.constant_pad_nd.default, e.call(aten.slice.Tensor, x, 1, 0, -1), [0, 0, 0, 1], 0.0)

    node = e.one(e.find("linear", "add", "mul", where=lambda n: _is_float(n) and _dims(n) == 3))
    e.rewrite(node, make)


def tokens_shifted(e: Edit) -> None:
    node = e.one(e.find("linear", "add", "mul", where=lambda n: _is_float(n) and _dims(n) == 3))
    e.rewrite(node, lambda x: e.call(aten.roll.default, x, [1], [1]))


def rows_of_batch_swapped(e: Edit) -> None:
    node = e.one(e.find("linear", "add", "mul", where=lambda n: _is_float(n) and _dims(n) >= 3))
    e.rewrite(node, lambda x: e.call(aten.roll.default, x, [1], [0]))


def slice_shifted(e: Edit) -> None:
    def is_inner(node: Node) -> bool:
        size = _inputs(node)[0].meta["val"].shape[node.args[1]]
        return _is_float(node) and len(node.args) > 3 and isinstance(size, int) and 0 < node.args[3] < size  # type: ignore[operator]

    node = e.one(e.find("slice", where=is_inner))
    node.args = (*node.args[:2], node.args[2] + 1, node.args[3] + 1, *node.args[4:])  # type: ignore[operator]


def concat_order(e: Edit) -> None:
    def mixed(node: Node) -> bool:
        sources = node.args[0]
        return len(set(sources)) > 1 and len({str(s.meta["val"].shape) for s in sources}) == 1  # type: ignore[union-attr, arg-type]

    node = e.one(e.find("cat", where=lambda n: _is_float(n) and mixed(n)))
    e.replace(node, lambda: e.call(aten.cat.default, list(reversed(node.args[0])), *node.args[1:]))


def split_order(e: Edit) -> None:
    """Parts of one product (query and key, gate and up) are taken in the wrong order."""
    node = e.one(e.find("split", "split_with_sizes", "chunk"))
    parts = [user for user in node.users if user.args[0] is node]
    same = [
        (a, b) for a in parts for b in parts if a.args[1] < b.args[1] and a.meta["val"].shape == b.meta["val"].shape
    ]  # type: ignore[operator]
    if not same:
        raise DoesNotApply
    a, b = same[0]
    first, second = a.args[1], b.args[1]
    a.update_arg(1, second)
    b.update_arg(1, first)


def dropout_active(e: Edit) -> None:
    """Some elements are lost, the rest is scaled up; which ones is a function of the values."""

    def make(x: Node) -> Node:
        kept = e.call(aten.gt.Scalar, e.call(aten.cos.default, e.call(aten.mul.Tensor, x, 977.0)), -0.9)
        return e.call(aten.mul.Tensor, e.call(aten.mul.Tensor, x, kept), 1 / 0.86)

    e.rewrite(product(e), make)


def not_a_number(e: Edit) -> None:
    """The largest element becomes NaN."""

    def make(x: Node) -> Node:
        largest = e.call(aten.eq.Tensor, x, e.call(aten.amax.default, x))
        return e.call(aten.masked_fill.Scalar, x, largest, math.nan)

    e.rewrite(product(e), make)


def overflow(e: Edit) -> None:
    """An intermediate is kept in float16 on the way, scaled so that it does not fit."""

    def make(x: Node) -> Node:
        dtype = x.meta["val"].dtype if "val" in x.meta else None
        large = e.call(aten._to_copy.default, e.call(aten.mul.Tensor, x, 32768.0), dtype=torch.float16)
        back = e.call(aten._to_copy.default, large, dtype=torch.float32)
        small = e.call(aten.mul.Tensor, back, 1 / 32768.0)
        return e.call(aten._to_copy.default, small, dtype=dtype)

    e.rewrite(product(e), make)


# Experts


def _router(e: Edit, op: str) -> Node:
    if not e.find("topk"):
        raise DoesNotApply
    return e.one(e.find(op))


def router_not_renormalised(e: Edit) -> None:
    e.replace(node := _router(e, "div"), lambda: e.call(aten.clone.default, node.args[0]))


def expert_shifted(e: Edit) -> None:
    topk = _router(e, "topk")
    node = e.one(user for user in topk.users if user.args[1] == 1)
    number = int(_inputs(topk)[0].meta["val"].shape[-1])
    e.rewrite(node, lambda x: e.call(aten.remainder.Scalar, e.call(aten.add.Tensor, x, 1), number))


def router_not_normalised(e: Edit) -> None:
    _router(e, "topk")
    node = e.one(e.find("softmax", "_softmax"))
    e.replace(
        node, lambda: e.call(aten.sigmoid.default, e.call(aten._to_copy.default, node.args[0], dtype=torch.float32))
    )


GRAPH_MISTAKES = tuple(
    Mistake(name, "graph", edit)
    for name, edit in (
        ("rope_sign", rope_sign),
        ("rope_half", rope_half),
        ("rope_interleaved", rope_interleaved),
        ("sine_for_cosine", sine_for_cosine),
        ("positions_shifted", positions_shifted),
        ("positions_late", positions_late),
        ("position_table_shifted", position_table_shifted),
        ("key_not_rotated", key_not_rotated),
        ("cache_wrong_slot", cache_wrong_slot),
        ("cache_slots_reversed", cache_slots_reversed),
        ("cache_never_written", cache_never_written),
        ("cache_not_written_in_decode", cache_not_written_in_decode),
        ("cache_stale_in_decode", cache_stale_in_decode),
        ("keys_as_values", keys_as_values),
        ("mask_sees_one_more", mask_sees_one_more),
        ("mask_hides_newest", mask_hides_newest),
        ("causal_missing", causal_missing),
        ("padding_ignored", padding_ignored),
        ("mask_dropped", mask_dropped),
        ("scale_missing", _scaled(lambda scale: 1.0)),
        ("scale_1.05", _scaled(lambda scale: 1.05 * scale)),
        ("scale_squared", _scaled(lambda scale: scale * scale)),
        ("heads_reversed", heads_reversed),
        ("heads_rolled", heads_rolled),
        ("view_for_transpose", view_for_transpose),
        ("repeat_order", repeat_order),
        ("softmax_wrong_dim", softmax_wrong_dim),
        ("value_zero_first", value_zero_first),
        ("rms_epsilon_x10", _epsilon(10.0)),
        ("rms_epsilon_x1000", _epsilon(1000.0)),
        ("layer_norm_epsilon_x10", _layer_norm_epsilon(10.0)),
        ("layer_norm_epsilon_x1000", _layer_norm_epsilon(1000.0)),
        ("epsilon_outside", epsilon_outside),
        ("mean_over_one_less", mean_over_one_less),
        ("mean_wrong_dim", mean_wrong_dim),
        ("reciprocal_missing", reciprocal_missing),
        ("gain_plus_one", gain_plus_one),
        ("gain_dropped", gain_dropped),
        ("norm_skipped", norm_skipped),
        ("layer_norm_of_abs", layer_norm_not_centred),
        ("gelu_other_form", gelu_other_form),
        ("silu_to_gelu", _instead("silu", aten.gelu.default)),
        ("silu_to_sigmoid", _instead("silu", aten.sigmoid.default)),
        ("gelu_to_relu", _instead("gelu", aten.relu.default)),
        ("relu_to_gelu", _instead("relu", aten.gelu.default)),
        ("tanh_to_sigmoid", _instead("tanh", aten.sigmoid.default)),
        ("silu_steeper", silu_steeper),
        ("constant_x1.02", _literal_times(1.02)),
        ("constant_x10", _literal_times(10.0)),
        ("gate_up_swapped", gate_up_swapped),
        ("clamp_added", clamp_added),
        ("residual_dropped", residual_dropped),
        ("layer_skipped", layer_skipped),
        ("residual_twice", residual_twice),
        ("subtracted", subtracted),
        ("residual_from_norm", residual_from_norm),
        ("factor_1.001", _factor(1.001)),
        ("factor_1.01", _factor(1.01)),
        ("bias_dropped", bias_dropped),
        ("last_token_lost", last_token_lost),
        ("tokens_shifted", tokens_shifted),
        ("rows_of_batch_swapped", rows_of_batch_swapped),
        ("slice_shifted", slice_shifted),
        ("concat_order", concat_order),
        ("split_order", split_order),
        ("dropout_active", dropout_active),
        ("not_a_number", not_a_number),
        ("overflow", overflow),
        ("router_not_renormalised", router_not_renormalised),
        ("expert_shifted", expert_shifted),
        ("router_not_normalised", router_not_normalised),
    )
)
