"""Attention as back-ends compile it: heads that share keys and values without copies, or as products of matrices.

A program repeats keys and values for the heads that share them, because `aten.scaled_dot_product_attention` wants as
many as there are heads of queries. What a step of one token does is then mostly that copy: it writes and reads the
whole cache as often as heads share it. The queries of such heads can be rows of one head instead, which changes no
number: every row of attention is on its own.
"""

from __future__ import annotations

import contextlib
import math
import sys
from typing import Any

import torch
from torch import SymInt
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from glassengine.program.representation.program import copied_graph, rebuilt

MARK = "__grouped"
"""In the names of nodes that are put in: before it stands the name of the node they are a part of."""

# The mask is repeated instead, for every row: more heads than these share it at the cost of too much memory.
_MAX_HEADS = 8

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)


def with_grouped_queries(exported: ExportedProgram) -> ExportedProgram:
    """Return the program with heads that share keys and values as rows of one head; itself where there are none.

    Names of its nodes, its inputs and its outputs stay as they are.
    """
    graph = copied_graph(exported.graph)
    masks: dict[tuple[Node, int], Node] = {}
    changed = [_group(graph, node, masks) for node in graph.find_nodes(op="call_function", target=_ATTENTION)]
    if not any(changed):
        return exported
    graph.lint()
    return rebuilt(exported, graph, exported.graph_signature.output_specs)


def with_plain_attention(exported: ExportedProgram) -> ExportedProgram:
    """Return the program with attention as products of matrices, in which no row depends on the size of the batch.

    The kernel divides a step of few tokens among threads, by another rule where the batch has one row.
    """
    graph = copied_graph(exported.graph)
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        _write_out(graph, node)
    graph.lint()
    return rebuilt(exported, graph, exported.graph_signature.output_specs)


def node_of(name: str) -> str:
    """Return the name of the node of the program that a node of the compiled graph is a part of."""
    return name.partition(MARK)[0]


def _group(graph: Graph, node: Node, masks: dict[tuple[Node, int], Node]) -> bool:
    """Change one attention, if it can be."""
    arguments, by_rows = _arguments(node), _lies_by_rows(node)
    if arguments is None or by_rows is None:
        return False
    query, keys, values, mask = arguments
    shared, shared_values = _repeated(keys), _repeated(values)
    if shared is None or shared_values is None or shared[1] != shared_values[1]:
        return False
    (key, heads), (value, _) = shared, shared_values
    if not 1 < heads <= _MAX_HEADS or not (mask is None or _fits(mask, query)):
        return False
    if mask is not None and _size(mask, -2) != 1:
        if (mask, heads) not in masks:
            masks[mask, heads] = _rows_of(graph, mask, heads)
        mask = masks[mask, heads]
    scale = {"scale": node.kwargs["scale"]} if "scale" in node.kwargs else {}
    with graph.inserting_before(node):
        apart = _call(graph, node, "query", _aten.unflatten.int, query, 1, [-1, heads])
        rows = _call(graph, node, "rows", _aten.flatten.using_ints, apart, 2, 3)
        result = _call(graph, node, "attention", _ATTENTION, rows, key, value, mask, **scale)
        result = _call(graph, node, "parts", _aten.unflatten.int, result, 2, [heads, -1])
        if by_rows:
            result = _call(graph, node, "ordered", _aten.permute.default, result, [0, 3, 1, 2, 4])
        result = _call(graph, node, "copied", _aten.clone.default, result, memory_format=torch.contiguous_format)
        target, dims = _aten.flatten.using_ints, (1, 2)
        if by_rows:
            result = _call(graph, node, "joined", target, result, 2, 3)
            target = _aten.transpose.int
    # It keeps its name, which outputs and recordings go by.
    node.target, node.args, node.kwargs = target, (result, *dims), {}
    return True


def _write_out(graph: Graph, node: Node) -> None:
    given = _arguments(node)
    if given is None:
        return
    query, keys, values, mask = given
    dtype = query.meta["val"].dtype
    scale = node.kwargs.get("scale") or float(query.meta["val"].shape[-1]) ** -0.5
    with graph.inserting_before(node):
        # The kernel adds in float32 as well.
        query, keys, values = (
            _call(graph, node, "wide", _aten.to.dtype, part, torch.float32) if dtype.itemsize < 4 else part
            for part in (query, keys, values)
        )
        scaled = _call(graph, node, "scaled", _aten.mul.Tensor, query, scale)
        turned = _call(graph, node, "turned", _aten.transpose.int, keys, -2, -1)
        scores = _call(graph, node, "scores", _aten.matmul.default, scaled, turned)
        if mask is not None and mask.meta["val"].dtype == torch.bool:
            scores = _call(graph, node, "masked", _aten.where.ScalarOther, mask, scores, -math.inf)
        elif mask is not None:
            scores = _call(graph, node, "masked", _aten.add.Tensor, scores, mask)
        shares = _call(graph, node, "shares", _aten._safe_softmax.default, scores, -1)
        result = _call(graph, node, "result", _aten.matmul.default, shares, values)
        target: Any = _aten.to.dtype
        arguments: tuple[Any, ...] = (result, dtype)
        if _lies_by_rows(node):
            result = _call(graph, node, "narrow", target, *arguments)
            result = _call(graph, node, "ordered", _aten.transpose.int, result, 1, 2)
            result = _call(graph, node, "copied", _aten.clone.default, result, memory_format=torch.contiguous_format)
            target, arguments = _aten.transpose.int, (result, 1, 2)
    # It keeps its name, which outputs and recordings go by.
    node.target, node.args, node.kwargs = target, arguments, {}


def _arguments(node: Node) -> tuple[Node, Node, Node, Node | None] | None:
    """Return query, keys, values and mask; None where there is more to it: dropout, or a mask of its own."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("dropout_p", 0.0) or given.get("is_causal", False) or given.get("enable_gqa", False):
        return None
    found = [given["query"], given["key"], given["value"]]
    mask = given.get("attn_mask")
    if not all(isinstance(item, Node) and item.meta["val"].dim() == 4 for item in found):
        return None
    return (*found, mask)  # type: ignore[return-value]


def _lies_by_rows(node: Node) -> bool | None:
    """Return whether the result lies in memory as [batch, rows, heads, size], or as it is; None for another order.

    What follows expects the memory in the order in which it is.
    """
    result: torch.Tensor = node.meta["val"]
    heads, rows, size = (result.shape[dim] for dim in (1, 2, 3))
    strides = [str(stride) for stride in result.stride()[1:]]
    if strides == [str(size), str(heads * size), "1"]:
        return True
    return False if strides == [str(rows * size), str(size), "1"] else None


def _repeated(node: Node) -> tuple[Node, int] | None:
    """Return (tensor [batch, heads, length, size], n) where `node` is that tensor with every head n times in a row."""
    full = node.meta["val"]
    if node.target not in _RESHAPES:
        return None
    node = _first(node)
    if node.target is _aten.clone.default:
        node = _first(node)
    if node.target is not _aten.expand.default or node.meta["val"].dim() != 5:
        return None
    own, heads = _size(node, 1), _size(node, 2)
    if not isinstance(heads, int) or full.shape[1] != own * heads:
        return None
    node = _first(node)
    while node.target is _aten.slice.Tensor and _is_whole(node):
        node = _first(node)
    if node.target is not _aten.unsqueeze.default or node.args[1] not in (2, -3):
        return None
    found = _first(node)
    # Nothing else was repeated on the way.
    wanted = [full.shape[0], own, *full.shape[2:]]
    return (found, heads) if list(map(str, found.meta["val"].shape)) == list(map(str, wanted)) else None


def _is_whole(node: Node) -> bool:
    given = dict(zip(("start", "end", "step"), node.args[2:], strict=False))
    is_cut = given.get("start") not in (None, 0) or given.get("end") not in (None, sys.maxsize)
    return not is_cut and given.get("step") in (None, 1)


def _fits(mask: Node, query: Node) -> bool:
    """Return whether every head has the same mask, with one row or a row for each of the queries."""
    dims = mask.meta["val"].dim()
    if dims not in (2, 4) or (dims == 4 and _size(mask, 1) != 1):
        return False
    return _size(mask, -2) == 1 or str(_size(mask, -2)) == str(_size(query, 2))


def _rows_of(graph: Graph, mask: Node, heads: int) -> Node:
    """Return the mask [..., rows, length] as [..., heads x rows, length]."""
    dims = mask.meta["val"].dim()
    with graph.inserting_after(mask):
        apart = _call(graph, mask, f"mask{heads}", _aten.unsqueeze.default, mask, dims - 2)
    sizes = [heads if dim == dims - 2 else -1 for dim in range(dims + 1)]
    with graph.inserting_after(apart):
        each = _call(graph, mask, f"masks{heads}", _aten.expand.default, apart, sizes)
    with graph.inserting_after(each):
        return _call(graph, mask, f"rows{heads}", _aten.flatten.using_ints, each, dims - 2, dims - 1)


def _call(graph: Graph, part_of: Node, name: str, target: Any, *args: Any, **kwargs: Any) -> Node:
    node = graph.create_node("call_function", target, args, kwargs, f"{part_of.name}{MARK}_{name}")
    node.meta = dict(part_of.meta)
    values = torch.fx.map_arg(args, lambda argument: argument.meta["val"])
    # Attention makes numbers of its own for a mask of bools; they have no data either.
    with detect_fake_mode(values) or contextlib.nullcontext():
        node.meta["val"] = target(*values, **kwargs)
    return node


def _first(node: Node) -> Node:
    found = node.args[0]
    assert isinstance(found, Node)
    return found


def _size(node: Node, dim: int) -> int | SymInt:
    size: int | SymInt = node.meta["val"].shape[dim]
    return size
