"""Losses of precision: less than the dtype of the program promises."""

from __future__ import annotations

from collections.abc import Callable

import torch

from glassengine.program.representation.naming import op_name
from tests.corpus.edits import DoesNotApply, Edit, Mistake, Op
from tests.corpus.places import aten, product


def _dtype(node: Op) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _through(dtype: torch.dtype) -> Callable[[Edit, Op], Op]:
    def make(e: Edit, x: Op) -> Op:
        if torch.finfo(_dtype(x)).eps >= torch.finfo(dtype).eps:
            raise DoesNotApply
        return e.call(aten._to_copy.default, e.call(aten._to_copy.default, x, dtype=dtype), dtype=_dtype(x))

    return make


def _truncated(e: Edit, x: Op, mask: int) -> Op:
    """Cut mantissa bits of a float32 value off."""
    bits = e.call(aten.bitwise_and.Scalar, e.call(aten.view.dtype, x, torch.int32), mask)
    return e.call(aten.view.dtype, bits, torch.float32)


def _operand(make: Callable[[Edit, Op], Op]) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        node = product(e)
        e.feed(node, 1 if op_name(node) == "addmm" else 0, lambda x: make(e, x))

    return edit


def _tf32(e: Edit, x: Op) -> Op:
    if _dtype(x) is not torch.float32:
        raise DoesNotApply
    return _truncated(e, x, -(1 << 13))


def _cast_truncates(e: Edit) -> None:
    """A product is rounded towards zero instead of to nearest."""
    node = product(e)
    dtype = _dtype(node)
    if dtype is torch.float32 or op_name(node) != "linear":
        raise DoesNotApply

    def make() -> Op:
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


def _sum_in_halves(e: Edit) -> None:
    """A product is accumulated in the half precision of the program instead of float32."""
    node = product(e)
    if _dtype(node) is torch.float32 or op_name(node) != "linear" or len(node.args) > 2:
        raise DoesNotApply
    x, weight = node.args[:2]
    size = int(weight.meta["val"].shape[1])

    def make() -> Op:
        total: Op | None = None
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
        ("cast_truncates", _cast_truncates),
        ("island_bfloat16", _island(torch.bfloat16)),
        ("island_float16", _island(torch.float16)),
        ("sum_in_halves", _sum_in_halves),
    )
)
