"""Kinds of mistake in positions, caches, masks and attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from glassengine.program.representation.naming import op_name
from tests.corpus.edits import DoesNotApply, Edit, Mistake, Op
from tests.corpus.places import (
    aten,
    attention,
    feeds,
    inputs_of,
    is_float,
    num_dims,
)

_END = 9223372036854775807

# Positions


def _rope_sign(e: Edit) -> None:
    e.replace(node := e.one(e.find("neg", where=is_float)), lambda: e.call(aten.clone.default, node.args[0]))


def _rope_half(e: Edit) -> None:
    node = e.one(e.find("cat", where=lambda n: is_float(n) and any(op_name(s) == "neg" for s in n.args[0])))
    e.replace(node, lambda: e.call(aten.cat.default, list(reversed(node.args[0])), -1))


def _rope_interleaved(e: Edit) -> None:
    node = e.one(e.find("cat", where=lambda n: is_float(n) and any(op_name(s) == "neg" for s in n.args[0])))
    source = node.args[0][1].args[0]

    def make() -> Op:
        even, odd = (e.call(aten.slice.Tensor, source, -1, start, _END, 2) for start in (0, 1))
        pairs = e.call(aten.stack.default, [e.call(aten.neg.default, odd), even], -1)
        return e.call(aten.flatten.using_ints, pairs, -2, -1)

    e.replace(node, make)


def _sine_for_cosine(e: Edit) -> None:
    node = e.one(e.find("cos"))
    e.replace(node, lambda: e.call(aten.sin.default, node.args[0]))


def _positions(e: Edit) -> Op:
    return e.one(e.find("_to_copy", where=lambda n: is_float(n) and n.args[0].meta["val"].dtype is torch.int64))


def _positions_shifted(e: Edit) -> None:
    e.feed(_positions(e), 0, lambda x: e.call(aten.add.Tensor, x, 1))


def _positions_late(e: Edit) -> None:
    def make(x: Op) -> Op:
        late = e.call(aten.ge.Scalar, x, 12)
        return e.call(aten.add.Tensor, x, e.call(aten._to_copy.default, late, dtype=torch.int64))

    e.feed(_positions(e), 0, make)


def _position_table_shifted(e: Edit) -> None:
    """Learned positions are looked up one row too far."""
    node = e.one(e.find("embedding", where=lambda n: n.args[1].meta["val"].dtype is torch.int64))
    last = int(node.args[0].meta["val"].shape[0]) - 1
    e.feed(node, 1, lambda x: e.call(aten.clamp_max.default, e.call(aten.add.Tensor, x, 1), last))


def _key_not_rotated(e: Edit) -> None:
    node = e.one(e.find("add", where=lambda n: is_float(n) and feeds(n, "index_copy")))
    e.replace(node, lambda: e.call(aten.clone.default, inputs_of(inputs_of(node)[0])[0]))


# Cache


def _written(e: Edit) -> Op:
    return e.one(e.find("index_copy"))


def _is_decode(e: Edit, copy: Op) -> Op:
    first = e.call(aten.select.int, copy.args[2], 0, 0)
    return e.call(aten.gt.Scalar, first, 0)


def _cache_wrong_slot(e: Edit) -> None:
    e.feed(_written(e), 2, lambda x: e.call(aten.clamp_min.default, e.call(aten.sub.Tensor, x, 1), 0))


def _cache_slots_reversed(e: Edit) -> None:
    e.feed(_written(e), 2, lambda x: e.call(aten.flip.default, x, [0]))


def _cache_never_written(e: Edit) -> None:
    e.replace(node := _written(e), lambda: e.call(aten.clone.default, node.args[0]))


def _cache_not_written_in_decode(e: Edit) -> None:
    node = _written(e)
    e.rewrite(node, lambda new: e.call(aten.where.self, _is_decode(e, node), node.args[0], new))


def _cache_stale_in_decode(e: Edit) -> None:
    """The newest entry is half of what it should be, once there is a cache."""
    node = _written(e)

    def make(x: Op) -> Op:
        return e.call(aten.where.self, _is_decode(e, node), e.call(aten.mul.Tensor, x, 0.5), x)

    e.feed(node, 3, make)


def _cache_of_neighbour_in_decode(e: Edit) -> None:
    """Rows of the batch exchange their new entries, once there is a cache (beams reordered by mistake)."""
    node = _written(e)

    def make(x: Op) -> Op:
        return e.call(aten.where.self, _is_decode(e, node), e.call(aten.roll.default, x, [1], [0]), x)

    e.feed(node, 3, make)


def _cache_oldest_lost_in_decode(e: Edit) -> None:
    """The first slot is overwritten with zeros by every decode step."""
    node = _written(e)

    def make(written: Op) -> Op:
        rest = e.call(aten.slice.Tensor, written, 2, 1, _END)
        without = e.call(aten.constant_pad_nd.default, rest, [0, 0, 1, 0], 0.0)
        return e.call(aten.where.self, _is_decode(e, node), without, written)

    e.rewrite(node, make)


def _position_stuck_in_decode(e: Edit) -> None:
    """From the second decode step on the position no longer moves."""
    e.feed(_positions(e), 0, lambda x: e.call(aten.clamp_max.default, x, 12))


def _keys_as_values(e: Edit) -> None:
    node = attention(e)
    node.args = (node.args[0], node.args[2], node.args[1], *node.args[3:])


# Masks


def _causal(e: Edit) -> Op:
    return e.one(e.find("le", "lt", "ge", "gt", where=lambda n: len(inputs_of(n)) == 2))


def _mask_sees_one_more(e: Edit) -> None:
    e.feed(_causal(e), 1, lambda x: e.call(aten.add.Tensor, x, 1))


def _mask_hides_newest(e: Edit) -> None:
    e.feed(_causal(e), 1, lambda x: e.call(aten.sub.Tensor, x, 1))


def _causal_missing(e: Edit) -> None:
    e.rewrite(_causal(e), lambda x: e.call(aten.logical_or.default, x, e.call(aten.logical_not.default, x)))


def _padding_ignored(e: Edit) -> None:
    node = e.one(e.find("index", where=lambda n: n.meta["val"].dtype is torch.bool))
    e.rewrite(node, lambda x: e.call(aten.logical_or.default, x, e.call(aten.logical_not.default, x)))


def _mask_dropped(e: Edit) -> None:
    node = attention(e)
    if len(node.args) < 4 or node.args[3] is None:
        raise DoesNotApply
    node.args = (*node.args[:3], None, *node.args[4:])


# Attention


def _scaled(factor: Callable[[float], float]) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        node = attention(e)
        size = int(node.args[0].meta["val"].shape[-1])
        scale = node.kwargs.get("scale") or size**-0.5
        node.kwargs = {**node.kwargs, "scale": factor(float(scale))}

    return edit


def _heads_reversed(e: Edit) -> None:
    e.feed(attention(e), 0, lambda x: e.call(aten.flip.default, x, [1]))


def _heads_rolled(e: Edit) -> None:
    e.feed(attention(e), 2, lambda x: e.call(aten.roll.default, x, [1], [1]))


def _view_for_transpose(e: Edit) -> None:
    def has_view(node: Op) -> bool:
        source = node.args[0]
        return (
            node.args[1:] == (1, 2) and isinstance(source, Node) and op_name(source) == "view" and num_dims(node) == 4
        )

    node = e.one(e.find("transpose", where=has_view))
    sizes = list(node.args[0].args[1])
    sizes[1], sizes[2] = sizes[2], sizes[1]
    contiguous = torch.contiguous_format
    e.replace(
        node,
        lambda: e.call(aten.view.default, e.call(aten.clone.default, node.args[0], memory_format=contiguous), sizes),
    )


def _repeat_order(e: Edit) -> None:
    """Heads of keys and values are tiled instead of repeated."""

    def is_repeat(node: Op) -> bool:
        shape = node.meta["val"].shape
        return len(shape) == 5 and shape[1] == shape[2] and shape[1] != 1

    e.rewrite(e.one(e.find("expand", where=is_repeat)), lambda x: e.call(aten.transpose.int, x, 1, 2))


def _softmax_wrong_dim(e: Edit) -> None:
    node = e.one(e.find("softmax", "_softmax", where=is_float))
    node.update_arg(1, -2)


def _value_zero_first(e: Edit) -> None:
    """The first key is never seen."""

    def make(value: Op) -> Op:
        rest = e.call(aten.slice.Tensor, value, 2, 1, _END)
        return e.call(aten.constant_pad_nd.default, rest, [0, 0, 1, 0], 0.0)

    e.feed(attention(e), 2, make)


ATTENTION_MISTAKES = tuple(
    Mistake(name, "graph", edit)
    for name, edit in (
        ("rope_sign", _rope_sign),
        ("rope_half", _rope_half),
        ("rope_interleaved", _rope_interleaved),
        ("sine_for_cosine", _sine_for_cosine),
        ("positions_shifted", _positions_shifted),
        ("positions_late", _positions_late),
        ("position_table_shifted", _position_table_shifted),
        ("key_not_rotated", _key_not_rotated),
        ("cache_wrong_slot", _cache_wrong_slot),
        ("cache_slots_reversed", _cache_slots_reversed),
        ("cache_never_written", _cache_never_written),
        ("cache_not_written_in_decode", _cache_not_written_in_decode),
        ("cache_stale_in_decode", _cache_stale_in_decode),
        ("cache_of_neighbour_in_decode", _cache_of_neighbour_in_decode),
        ("cache_oldest_lost_in_decode", _cache_oldest_lost_in_decode),
        ("position_stuck_in_decode", _position_stuck_in_decode),
        ("keys_as_values", _keys_as_values),
        ("mask_sees_one_more", _mask_sees_one_more),
        ("mask_hides_newest", _mask_hides_newest),
        ("causal_missing", _causal_missing),
        ("padding_ignored", _padding_ignored),
        ("mask_dropped", _mask_dropped),
        ("scale_missing", _scaled(lambda scale: 1.0)),
        ("scale_1.05", _scaled(lambda scale: 1.05 * scale)),
        ("scale_squared", _scaled(lambda scale: scale * scale)),
        ("heads_reversed", _heads_reversed),
        ("heads_rolled", _heads_rolled),
        ("view_for_transpose", _view_for_transpose),
        ("repeat_order", _repeat_order),
        ("softmax_wrong_dim", _softmax_wrong_dim),
        ("value_zero_first", _value_zero_first),
    )
)
