"""What products of matrices do to tensors that are cut."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from glassengine.program.parallel.local import Local, Placed, args_of, shape_of
from glassengine.program.parallel.placements import Placement


def linear(node: Node, placed: Placed, ranks: int) -> Local | None:
    """[..., in] x [out, in]: rows of the weight make a cut result, columns terms of a sum."""
    source, weight = args_of(node)[:2]
    bias = args_of(node)[2] if len(args_of(node)) > 2 else None
    last = len(shape_of(source)) - 1
    return _product(node, placed, source, weight, bias, at=2, inner=(last, 1), outer=(None, 0), result=last)


def addmm(node: Node, placed: Placed, ranks: int) -> Local | None:
    """[rows, in] x [in, out], and a bias."""
    if node.kwargs:
        return None
    bias, source, weight = args_of(node)[:3]
    return _product(node, placed, source, weight, bias, at=0, inner=(1, 0), outer=(0, 1), result=1)


def mm(node: Node, placed: Placed, ranks: int) -> Local | None:
    """[rows, in] x [in, out]."""
    source, weight = args_of(node)[:2]
    return _product(node, placed, source, weight, None, at=None, inner=(1, 0), outer=(0, 1), result=1)


def batched(node: Node, placed: Placed, ranks: int) -> Local | None:
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
