"""Rewrites of a graph that are no mistakes: what a port or an optimizing pass does to the same computation.

They change kernels, order, layout and the number of ops; a verdict that flags one of them is a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from glassengine.program.representation.naming import op_name
from tests.corpus.edits import DoesNotApply, Edit, Mistake, Op
from tests.corpus.places import aten, is_float


def _all(*ops: str, make: Callable[[Edit, Op], Op | None]) -> Callable[[Edit], None]:
    """Rewrite every op of a kind; `make` returns None where it does not apply."""

    def edit(e: Edit) -> None:
        done = 0
        for node in e.find(*ops):
            with e.graph.inserting_before(node):
                new = make(e, node)
            if new is not None:
                node.replace_all_uses_with(new)
                e.graph.erase_node(node)
                e.moved[node.name] = new
                done += 1
        if not done:
            raise DoesNotApply

    return edit


def _product_by_transpose(e: Edit, node: Op) -> Op | None:
    if len(node.args) > 2:
        return None
    return e.call(aten.matmul.default, node.args[0], e.call(aten.transpose.int, node.args[1], 0, 1))


def _commuted(e: Edit, node: Op) -> Op | None:
    if len(node.args) < 2 or not all(is_float(arg) for arg in node.args[:2]) or node.kwargs:
        return None
    left, right = (arg.meta["val"] for arg in node.args[:2])
    # The operand that comes first lays the result out in memory, and what follows may view it.
    if right.dim() == left.dim() and str((left.shape, left.stride())) != str((right.shape, right.stride())):
        return None
    return e.call(node.target, node.args[1], node.args[0])


def _rsqrt(e: Edit, node: Op) -> Op:
    return e.call(aten.reciprocal.default, e.call(aten.sqrt.default, node.args[0]))


def _silu(e: Edit, node: Op) -> Op:
    return e.call(aten.mul.Tensor, node.args[0], e.call(aten.sigmoid.default, node.args[0]))


def _square(e: Edit, node: Op) -> Op | None:
    return e.call(aten.mul.Tensor, node.args[0], node.args[0]) if node.args[1] == 2 else None


def _mean(e: Edit, node: Op) -> Op | None:
    sizes = [node.args[0].meta["val"].shape[dim] for dim in node.args[1]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    total = e.call(aten.sum.dim_IntList, *node.args)
    return e.call(aten.mul.Tensor, total, 1 / math.prod(sizes))


def _bias_apart(e: Edit, node: Op) -> Op | None:
    """The product is rounded before the bias is added."""
    if op_name(node) == "addmm":
        if node.kwargs:
            return None
        return e.call(aten.add.Tensor, e.call(aten.mm.default, *node.args[1:]), node.args[0])
    if len(node.args) < 3 or node.args[2] is None:
        return None
    return e.call(aten.add.Tensor, e.call(aten.linear.default, *node.args[:2]), node.args[2])


def _attention(e: Edit, node: Op) -> Op | None:
    """Scores, softmax in float32, context: transformers' eager attention."""
    query, key, value, *rest = node.args
    mask = rest[0] if rest else None
    if mask is None or mask.meta["val"].dtype is not torch.bool:
        return None
    num_queries, num_keys = (int(heads.meta["val"].shape[1]) for heads in (query, key))
    if num_queries != num_keys:
        groups = num_queries // num_keys
        key, value = (e.call(aten.repeat_interleave.self_int, heads, groups, 1) for heads in (key, value))
    dtype = node.meta["val"].dtype
    scale = node.kwargs.get("scale") or int(query.meta["val"].shape[-1]) ** -0.5
    scores = e.call(aten.mul.Tensor, e.call(aten.matmul.default, query, e.call(aten.transpose.int, key, 2, 3)), scale)
    hidden = e.call(aten.masked_fill.Scalar, scores, e.call(aten.logical_not.default, mask), torch.finfo(dtype).min)
    wide = e.call(aten._to_copy.default, hidden, dtype=torch.float32)
    shares = e.call(aten._to_copy.default, e.call(aten.softmax.int, wide, -1), dtype=dtype)
    context = e.call(aten.transpose.int, e.call(aten.matmul.default, shares, value), 1, 2)
    # The fused kernel leaves its result in this layout, and what follows may view it.
    laid_out = e.call(aten.clone.default, context, memory_format=torch.contiguous_format)
    return e.call(aten.transpose.int, laid_out, 1, 2)


def fused_products(e: Edit) -> None:
    """Products of one input become one product over concatenated weights, cut apart afterwards."""
    done = 0
    for node in e.find("linear"):
        if node.graph is None or node not in set(e.graph.nodes):
            continue
        source = node.args[0]
        group = [n for n in source.users if op_name(n) == "linear" and n.args[0] is source and len(n.args) == 2]
        if len(group) < 2:
            continue
        order = {n: i for i, n in enumerate(e.graph.nodes)}
        group.sort(key=order.__getitem__)
        with e.graph.inserting_before(group[0]):
            whole = e.call(aten.linear.default, source, e.call(aten.cat.default, [n.args[1] for n in group], 0))
            start = 0
            for part in group:
                stop = start + int(part.meta["val"].shape[-1])
                new = e.call(aten.slice.Tensor, whole, -1, start, stop)
                start = stop
                part.replace_all_uses_with(new)
                e.moved[part.name] = new
        for part in group:
            e.graph.erase_node(part)
        done += 1
    if not done:
        raise DoesNotApply


REWRITES = tuple(
    Mistake(name, "rewrite", edit)
    for name, edit in (
        ("products by transpose", _all("linear", make=_product_by_transpose)),
        ("fused products", fused_products),
        ("commuted", _all("add", "mul", make=_commuted)),
        ("root by reciprocal", _all("rsqrt", make=_rsqrt)),
        ("silu written out", _all("silu", make=_silu)),
        ("square by product", _all("pow", make=_square)),
        ("mean by sum", _all("mean", make=_mean)),
        ("bias apart", _all("linear", "addmm", make=_bias_apart)),
        ("attention written out", _all("scaled_dot_product_attention", make=_attention)),
    )
)
