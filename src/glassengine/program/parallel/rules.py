"""Rules for ops on tensors that are cut: one for each kind of op, none where inputs must be whole.

A rule says how the inputs must lie so that each rank can run the op on its own part, and how the result lies then. An
op without one reads whole inputs on every rank, which is right for any op and costs a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from glassengine.ops.row import argument
from glassengine.ops.traits import TABLE
from glassengine.program.parallel.placements import (
    Local,
    Placed,
    Placement,
    Rule,
    ShardPlacement,
    args_of,
    name_of,
    shape_of,
)


def local(node: Node, placed: Placed, ranks: int) -> Local | None:
    """Return how `node` runs on parts, as far as its inputs are cut; None where they must be whole."""
    rule = _RULES.get(name_of(node)) or (_pointwise if _is_pointwise(node) else None)
    found = rule(node, placed, ranks) if rule else None
    if found is None:
        return None
    outs = found.out if isinstance(found.out, tuple) else (found.out,)
    cuts = [cut for cut in (*outs, *found.wants.values()) if cut is not None]
    return found if all(cut.fits(ranks) for cut in cuts) else None


def reads_sizes(node: Node) -> bool:
    """Whether an op reads no more of its inputs than their sizes."""
    return _RULES.get(name_of(node)) is _size


def _is_pointwise(node: Node) -> bool:
    tagged = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    traits = TABLE.get(name_of(node))
    return tagged or (traits is not None and bool(traits.in_place))


def _axis(axis: Any, rank: int) -> int:
    return int(axis) % rank if rank else 0


def _pointwise(node: Node, placed: Placed, ranks: int) -> Local | None:
    """Elements in the same place: all inputs cut as the result is, those of size 1 there whole."""
    rank = len(shape_of(node))
    inputs = [item for item in node.all_input_nodes if isinstance(item.meta.get("val"), torch.Tensor)]
    cuts = {placed(i).on(placed(i).axis + rank - len(shape_of(i))): None for i in inputs if placed(i) is not None}
    out = next(iter(cuts))
    wants: dict[Node, Placement] = {}
    for item in inputs:
        shape = shape_of(item)
        axis = out.axis - rank + len(shape)
        wants[item] = out.on(axis) if axis >= 0 and shape[axis] == sum(out.blocks) else None
    return Local(out, wants)


def _kept(read: str = "", *, out_axis: Callable[[Node, int], int | None] | None = None) -> Rule:
    """Ops that pass the first argument on, but read an axis (or several): any other may be cut.

    Args:
        read: Argument that names the axis; none where no axis is read.
        out_axis: Axis of the input -> axis of the result; None where it is the same.
    """

    def rule(node: Node, placed: Placed, ranks: int) -> Local | None:
        source = args_of(node)[0]
        cut = placed(source)
        if cut is None or any(placed(i) is not None for i in node.all_input_nodes if i is not source):
            return None
        rank = len(shape_of(source))
        if read:
            given = argument(node, read)
            axes = given if isinstance(given, (list, tuple)) else [given]
            if given is None or any(_axis(axis, rank) == cut.axis for axis in axes):
                return None
        axis = cut.axis if out_axis is None else out_axis(node, cut.axis)
        if axis is None:
            return None
        out: Any = cut.on(axis)
        value = node.meta["val"]
        if isinstance(value, (list, tuple)):
            out = tuple(out for _ in value)
        return Local(out, {source: cut})

    return rule


def _reduction(node: Node, placed: Placed, ranks: int) -> Local | None:
    source = args_of(node)[0]
    cut = placed(source)
    rank = len(shape_of(source))
    given = argument(node, "dim")
    if given is None or given == []:
        return None
    read = {_axis(axis, rank) for axis in (given if isinstance(given, (list, tuple)) else [given])}
    if cut.axis in read:
        return Local(None, {source: cut}, partial=True) if name_of(node) == "sum" else None
    keeps = len(shape_of(node)) == rank
    return Local(cut.on(cut.axis if keeps else cut.axis - sum(axis < cut.axis for axis in read)), {source: cut})


def _embedding(node: Node, placed: Placed, ranks: int) -> Local | None:
    table, rows = args_of(node)[:2]
    cut = placed(table)
    if cut is None or placed(rows) is not None:
        return None
    if cut.axis == 1:
        return Local(cut.on(len(shape_of(node)) - 1), {table: cut, rows: None})
    return Local(None, {table: cut, rows: None}, partial=True, offset=True) if len(cut.blocks) == 1 else None


def _index(node: Node, placed: Placed, ranks: int) -> Local | None:
    source, indices = args_of(node)[:2]
    cut = placed(source)
    given = [(at, item) for at, item in enumerate(indices) if item is not None]
    if cut is None or len(given) != 1 or placed(given[0][1]) is not None or given[0][0] == cut.axis:
        return None
    at, item = given[0]
    axis = cut.axis if cut.axis < at else cut.axis + len(shape_of(item)) - 1
    return Local(cut.on(axis), {source: cut, item: None})


def _written(node: Node, placed: Placed, ranks: int) -> Local | None:
    """`index_copy` and the like: what is written lies as what it is written into."""
    source, axis, index, values = args_of(node)[:4]
    cut = placed(values) or placed(source)
    if cut is None or _axis(axis, len(shape_of(source))) == cut.axis or placed(index) is not None:
        return None
    return Local(cut, {source: cut, values: cut, index: None})


def _cat(node: Node, placed: Placed, ranks: int) -> Local | None:
    tensors: Any = args_of(node)[0]
    axis = _axis(argument(node, "dim"), len(shape_of(node)))
    cuts = [placed(item) for item in tensors]
    first = next(cut for cut in cuts if cut is not None)
    if first.axis != axis:
        return Local(first, dict.fromkeys(tensors, first))
    if any(cut is None or cut.axis != axis for cut in cuts):
        return None
    return Local(
        ShardPlacement(axis, tuple(b for cut in cuts for b in cut.blocks)), dict(zip(tensors, cuts, strict=True))
    )


def _slice(node: Node, placed: Placed, ranks: int) -> Local | None:
    source = args_of(node)[0]
    cut = placed(source)
    axis, start, stop, step = (argument(node, name) for name in ("dim", "start", "end", "step"))
    if _axis(axis, len(shape_of(source))) != cut.axis:
        return Local(cut, {source: cut})
    if isinstance(start, Node) or isinstance(stop, Node) or step != 1:
        return None
    size = sum(cut.blocks)
    begin, end = start or 0, size if stop is None or stop > size else stop
    edges = [sum(cut.blocks[:number]) for number in range(len(cut.blocks) + 1)]
    begin, end = (edge + size if edge < 0 else edge for edge in (begin, end))
    if begin not in edges or end not in edges or begin == end:
        return None
    out = ShardPlacement(cut.axis, cut.blocks[edges.index(begin) : edges.index(end)])
    return Local(out, {source: cut}, args=(source, axis, begin // ranks, end // ranks))


def _split(node: Node, placed: Placed, ranks: int) -> Local | None:
    source, sizes = args_of(node)[:2]
    cut = placed(source)
    axis = argument(node, "dim")
    pieces = node.meta["val"]
    if _axis(axis, len(shape_of(source))) != cut.axis:
        return Local(tuple(cut for _ in pieces), {source: cut})
    lengths = tuple(int(piece.shape[cut.axis]) for piece in pieces)
    if lengths != cut.blocks:
        return None
    local_sizes = [size // ranks for size in lengths]
    given = local_sizes if isinstance(sizes, (list, tuple)) else local_sizes[0]
    outs = tuple(ShardPlacement(cut.axis, (length,)) for length in lengths)
    return Local(outs, {source: cut}, args=(source, given, axis))


def _view(node: Node, placed: Placed, ranks: int) -> Local | None:
    source, sizes = args_of(node)[:2]
    out = _viewed(placed(source), shape_of(source), shape_of(node))
    if out is None:
        return None
    new: Any = list(sizes)
    if isinstance(new[out.axis], int) and new[out.axis] != -1:
        new[out.axis] = sum(out.blocks) // ranks
    return Local(out, {source: placed(source)}, args=(source, new))


def _viewed(cut: ShardPlacement, old: Sequence[Any], new: Sequence[Any]) -> ShardPlacement | None:
    """Return how a reshaped tensor is cut; sizes may be symbols, which are compared as they are written."""
    before, after = [str(size) for size in old], [str(size) for size in new]
    tail = 0
    while tail < min(len(old), len(new)) and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    if cut.axis >= len(old) - tail:
        return cut.on(cut.axis + len(new) - len(old))
    head = 0
    while head < min(len(old), len(new)) - tail and before[head] == after[head]:
        head += 1
    if cut.axis < head:
        return cut
    apart, together = list(old[cut.axis : len(old) - tail]), list(new[head : len(new) - tail])
    if cut.axis != head or not together or not all(isinstance(size, int) for size in (*apart, *together)):
        return None
    first, size = together[0], sum(cut.blocks)
    if len(together) == 1:
        return cut.on(head, scale=first // size) if first % size == 0 else None
    if len(apart) > 1 or first == 1:
        return None
    inner = size // first
    if all(block % inner == 0 for block in cut.blocks):
        return cut.on(head, inner=inner)
    return None


def _expand(node: Node, placed: Placed, ranks: int) -> Local | None:
    source, sizes = args_of(node)[:2]
    cut = placed(source)
    out = cut.on(cut.axis + len(shape_of(node)) - len(shape_of(source)))
    new: Any = list(sizes)
    new[out.axis] = sum(out.blocks) // ranks
    return Local(out, {source: cut}, args=(source, new, *args_of(node)[2:]))


def _attention(node: Node, placed: Placed, ranks: int) -> Local | None:
    """Heads are independent: query, keys and values cut by heads, the mask too where it differs between them."""
    query, keys, values = args_of(node)[:3]
    cut = placed(query)
    if cut is None or cut.axis != 1 or len(shape_of(query)) != 4 or len(cut.blocks) != 1:
        return None
    wants: dict[Node, Placement] = {query: cut}
    for item in (keys, values):
        own = ShardPlacement(1, (shape_of(item)[1],))
        if not own.fits(ranks):
            return None
        wants[item] = own
    mask = argument(node, "attn_mask")
    if isinstance(mask, Node):
        shape = shape_of(mask)
        wants[mask] = cut if len(shape) == 4 and shape[1] == shape_of(query)[1] else None
    return Local(cut, wants)


def _repeated(node: Node, placed: Placed, ranks: int) -> Local | None:
    source, times = args_of(node)[:2]
    cut = placed(source)
    axis = argument(node, "dim")
    if axis is None or not isinstance(times, int):
        return None
    same = _axis(axis, len(shape_of(source))) == cut.axis
    return Local(cut.on(cut.axis, scale=times) if same else cut, {source: cut})


def _size(node: Node, placed: Placed, ranks: int) -> Local | None:
    """What reads sizes alone; those of axes that are cut are numbers in a graph already."""
    return Local(None, {args_of(node)[0]: placed(args_of(node)[0])})


def _transposed(node: Node, axis: int) -> int:
    rank = len(shape_of(node))
    first, second = (0, 1) if len(args_of(node)) < 3 else (_axis(a, rank) for a in args_of(node)[1:3])
    return {first: second, second: first}.get(axis, axis)


def _permuted(node: Node, axis: int) -> int:
    rank = len(shape_of(node))
    return [_axis(a, rank) for a in args_of(node)[1]].index(axis)


def _fewer(node: Node, axis: int) -> int | None:
    """Axis after the axes of one argument have gone."""
    given: Any = args_of(node)[1]
    rank = len(shape_of(args_of(node)[0]))
    gone = {_axis(a, rank) for a in (given if isinstance(given, (list, tuple)) else [given])}
    if name_of(node) == "squeeze":
        gone = {a for a in gone if shape_of(args_of(node)[0])[a] == 1}
    return axis - sum(a < axis for a in gone)


def _trailing(node: Node, axis: int) -> int | None:
    """Axis of a normalization, which reads the last ones."""
    return axis if axis < len(shape_of(args_of(node)[0])) - len(args_of(node)[1]) else None


def _linear(node: Node, placed: Placed, ranks: int) -> Local | None:
    """[..., in] x [out, in]: rows of the weight make a cut result, columns terms of a sum."""
    source, weight = args_of(node)[:2]
    bias = argument(node, "bias")
    last = len(shape_of(source)) - 1
    return _product(node, placed, source, weight, bias, at=2, inner=(last, 1), outer=(None, 0), result=last)


def _addmm(node: Node, placed: Placed, ranks: int) -> Local | None:
    """[rows, in] x [in, out], and a bias."""
    if node.kwargs:
        return None
    bias, source, weight = args_of(node)[:3]
    return _product(node, placed, source, weight, bias, at=0, inner=(1, 0), outer=(0, 1), result=1)


def _mm(node: Node, placed: Placed, ranks: int) -> Local | None:
    """[rows, in] x [in, out]."""
    source, weight = args_of(node)[:2]
    return _product(node, placed, source, weight, None, at=None, inner=(1, 0), outer=(0, 1), result=1)


def _batched(node: Node, placed: Placed, ranks: int) -> Local | None:
    """[..., rows, in] x [..., in, out] of as many axes: cut along a common one, or as a single product."""
    source, weight = args_of(node)[:2]
    rank = len(shape_of(source))
    if rank != len(shape_of(weight)) or rank < 2:
        return None
    for axis in range(rank - 2):
        cut = placed(source) or placed(weight)
        if cut.axis == axis and shape_of(source)[axis] == shape_of(weight)[axis]:
            return Local(cut, {source: cut, weight: cut})
    axes: dict[str, Any] = {"inner": (rank - 1, rank - 2), "outer": (rank - 2, rank - 1), "result": rank - 1}
    return _product(node, placed, source, weight, None, at=None, **axes)


def _product(
    node: Node,
    placed: Placed,
    source: Any,
    weight: Any,
    bias: Any,
    *,
    at: int | None,
    inner: tuple[int, int],
    outer: tuple[int | None, int],
    result: int,
) -> Local | None:
    """A product over the axes `inner` of source and weight; `outer` are the others, `at` is where the bias stands."""
    left, right = placed(source), placed(weight)
    added: dict[Node, Placement] = {} if bias is None else {bias: None}
    if right is not None and right.axis == outer[1]:
        if bias is not None:
            added = {bias: right.on(len(shape_of(bias)) - 1)}
        return Local(right.on(result), {source: None, weight: right, **added})
    if right is None and left is not None and left.axis == inner[0]:
        right = left.on(inner[1])
    if right is not None and right.axis == inner[1]:
        wants = {source: right.on(inner[0]), weight: right, **added}
        return Local(None, wants, partial=True, addend=None if bias is None else at)
    if right is None and left is not None and (bias is None or len(shape_of(bias)) == 1):
        return Local(left, {source: left, weight: None, **added})
    return None


_RULES: dict[str, Rule] = {
    **dict.fromkeys(["clone", "contiguous", "alias", "detach", "lift_fresh_copy"], _kept()),
    "type_as": _pointwise,
    **dict.fromkeys(["zeros_like", "ones_like", "full_like", "empty_like"], _kept()),
    **dict.fromkeys(["view", "_unsafe_view", "reshape"], _view),
    **dict.fromkeys(["transpose", "t"], _kept(out_axis=_transposed)),
    **dict.fromkeys(
        ["softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "argsort", "topk"],
        _kept("dim"),
    ),
    "flip": _kept("dims"),
    **dict.fromkeys(["sum", "mean", "amax", "amin", "logsumexp", "all", "any"], _reduction),
    **dict.fromkeys(["layer_norm", "rms_norm"], _kept(out_axis=_trailing)),
    **dict.fromkeys(["bmm", "matmul"], _batched),
    **dict.fromkeys(["split", "split_with_sizes"], _split),
    "permute": _kept(out_axis=_permuted),
    "unsqueeze": _kept(out_axis=lambda node, axis: axis + (_axis(args_of(node)[1], len(shape_of(node))) <= axis)),
    "squeeze": _kept("dim", out_axis=_fewer),
    "select": _kept("dim", out_axis=_fewer),
    "linear": _linear,
    "addmm": _addmm,
    "mm": _mm,
    "embedding": _embedding,
    "index": _index,
    "index_select": _kept("dim"),
    "index_copy": _written,
    "cat": _cat,
    "slice": _slice,
    "expand": _expand,
    "scaled_dot_product_attention": _attention,
    "repeat_interleave": _repeated,
    "getitem": lambda node, placed, ranks: Local(placed(args_of(node)[0])[args_of(node)[1]]),
    "sym_size": _size,
    "_assert_tensor_metadata": _size,
    "new_ones": _size,
    "new_zeros": _size,
    "new_full": _size,
}
