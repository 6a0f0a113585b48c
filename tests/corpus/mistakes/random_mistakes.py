"""Mistakes from a seed: an op, a literal, an order of arguments or a slice is changed at random."""

from __future__ import annotations

import math

from glassengine.program.representation.naming import op_name
from glassengine.program.representation.outputs import is_view
from tests.corpus.edits import DoesNotApply, Edit, Mistake, Op
from tests.corpus.places import aten, is_float

_UNARY = (
    aten.neg.default, aten.abs.default, aten.sin.default, aten.cos.default, aten.sigmoid.default, aten.tanh.default,
    aten.relu.default, aten.silu.default, aten.gelu.default, aten.erf.default, aten.exp.default, aten.rsqrt.default,
    aten.sqrt.default, aten.reciprocal.default, aten.square.default, aten.softplus.default, aten.floor.default,
)  # fmt: skip
_BINARY = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.minimum.default,
    aten.atan2.default, aten.hypot.default,
)  # fmt: skip


def _any(e: Edit) -> list[Op]:
    return [n for n in e.graph.nodes if n.op == "call_function" and is_float(n) and n in _reachable(e)]


def _reachable(e: Edit) -> set[Op]:
    constant = {n.name for n in e.find(*{op_name(n) for n in e.graph.nodes if n.op == "call_function"})}
    return {n for n in e.graph.nodes if n.name in constant}


def other_op(e: Edit) -> None:
    """Replace an op by another of the same signature."""
    nodes = [n for n in _any(e) if n.target in _UNARY or n.target in _BINARY]
    node = e.one(n for n in nodes if n.target in _UNARY or all(is_float(a) for a in n.args))
    pool = _UNARY if node.target in _UNARY else _BINARY
    target = e.random.choice([t for t in pool if t is not node.target])
    e.replace(node, lambda: e.call(target, *node.args))


def other_literal(e: Edit) -> None:
    """Disturb a number in the graph by between one part in a thousand and a factor of two."""
    nodes = [n for n in _any(e) if any(isinstance(a, float) for a in n.args) and op_name(n) not in ("pow", "slice")]
    node = e.one(nodes)
    factor = math.exp(e.random.choice((-1, 1)) * 10 ** e.random.uniform(-3, -0.16))
    node.args = tuple(a * factor if isinstance(a, float) else a for a in node.args)


def inputs_swapped(e: Edit) -> None:
    """Swap an input with another node's value of the same shape and dtype that is at hand."""
    order = list(e.graph.nodes)
    node = e.one(n for n in _any(e) if not is_view(n) and any(is_float(a) and a.op == "call_function" for a in n.args))
    slots = [i for i, a in enumerate(node.args) if is_float(a) and a.op == "call_function"]
    slot = e.random.choice(slots)
    source = node.args[slot]
    like = source.meta["val"]
    others = [
        n
        for n in order[: order.index(node)]
        if is_float(n)
        and n not in (source, node)
        and n.op == "call_function"
        and n.meta["val"].shape == like.shape
        and n.meta["val"].dtype is like.dtype
    ]
    node.update_arg(slot, e.one(others[-12:]))


def op_dropped(e: Edit) -> None:
    """An op passes its input on."""

    def same(node: Op) -> bool:
        source: Op = node.args[0] if node.args else None
        return (
            is_float(source)
            and source.meta["val"].shape == node.meta["val"].shape
            and source.meta["val"].dtype is node.meta["val"].dtype
        )

    node = e.one(n for n in _any(e) if same(n))
    e.replace(node, lambda: e.call(aten.clone.default, node.args[0]))


def slice_scaled(e: Edit) -> None:
    """Some indices of one fixed dimension are off by between 1 % and a factor of e."""
    node = e.one(
        n
        for n in _any(e)
        if isinstance(n.meta["val"].shape[-1] if n.meta["val"].dim() else None, int) and n.meta["val"].shape[-1] > 1
    )
    size = int(node.meta["val"].shape[-1])
    start = e.random.randrange(size)
    stop = min(size, start + e.random.randint(1, max(1, size // 4)))
    factor = math.exp(e.random.choice((-1, 1)) * 10 ** e.random.uniform(-2, 0))

    def make(x: Op) -> Op:
        wrong = e.call(aten.mul.Tensor, e.call(aten.slice.Tensor, x, -1, start, stop), factor)
        return e.call(aten.slice_scatter.default, x, wrong, -1, start, stop)

    e.rewrite(node, make)


def offset_added(e: Edit) -> None:
    """A constant is added to everything."""
    node = e.one(_any(e))
    amount = e.random.choice((-1, 1)) * 10 ** e.random.uniform(-1.5, 0.3)
    e.rewrite(node, lambda x: e.call(aten.add.Tensor, x, amount))


_KINDS = (other_op, other_literal, inputs_swapped, op_dropped, slice_scaled, offset_added)


def random_mistake(seed: int) -> Mistake:
    """Return the mistake that `seed` stands for."""

    def edit(e: Edit) -> None:
        kinds = list(_KINDS)
        e.random.shuffle(kinds)
        for kind in kinds:
            try:
                kind(e)
            except DoesNotApply:
                continue
            return
        raise DoesNotApply

    return Mistake(f"random_{seed}", "random", edit)


NUM_RANDOM = 24
RANDOM_MISTAKES = tuple(random_mistake(seed) for seed in range(NUM_RANDOM))
