"""Kinds of mistake in norms and activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glassengine.program.representation.naming import op_name
from tests.corpus.edits import Edit, Mistake, Op
from tests.corpus.places import (
    aten,
    comes_from,
    feeds,
    inputs_of,
    is_epsilon,
    is_float,
    literal_of,
    product,
)

# Norms


def _epsilon(factor: float) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        node = e.one(e.find("add", where=is_epsilon))
        node.args = tuple(arg * factor if isinstance(arg, float) else arg for arg in node.args)

    return edit


def _layer_norm_epsilon(factor: float) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        node = e.one(e.find("layer_norm", "native_layer_norm"))
        node.update_arg(4, float(node.args[4]) * factor)

    return edit


def _epsilon_outside(e: Edit) -> None:
    node = e.one(e.find("rsqrt", where=lambda n: is_epsilon(inputs_of(n)[0])))
    inside, epsilon = inputs_of(inputs_of(node)[0])[0], literal_of(inputs_of(node)[0])

    def make() -> Op:
        root = e.call(aten.add.Tensor, e.call(aten.sqrt.default, inside), epsilon)
        return e.call(aten.reciprocal.default, root)

    e.replace(node, make)


def _mean(e: Edit) -> Op:
    return e.one(e.find("mean", where=lambda n: n.args[1] == [-1]))


def _mean_over_one_less(e: Edit) -> None:
    node = _mean(e)
    size = int(inputs_of(node)[0].meta["val"].shape[-1])
    e.rewrite(node, lambda x: e.call(aten.mul.Tensor, x, size / (size - 1)))


def _mean_wrong_dim(e: Edit) -> None:
    """The mean over the tokens of a prompt instead of over the channels, in a place where both fit."""
    node = e.one(e.find("mean", where=lambda n: n.args[1] == [-1] and len(n.args) > 2 and bool(n.args[2])))

    def make() -> Op:
        mean = e.call(aten.mean.dim, node.args[0], [-2], True)
        return e.call(aten.mean.dim, e.call(aten.expand_as.default, mean, node.args[0]), [-1], True)

    e.replace(node, make)


def _reciprocal_missing(e: Edit) -> None:
    node = e.one(e.find("rsqrt"))
    e.replace(node, lambda: e.call(aten.sqrt.default, node.args[0]))


def _gain_plus_one(e: Edit) -> None:
    node = _gain(e)
    other = next(source for source in inputs_of(node) if source.op == "call_function")
    e.rewrite(node, lambda x: e.call(aten.add.Tensor, x, other))


def _gain_dropped(e: Edit) -> None:
    node = _gain(e)
    other = next(source for source in inputs_of(node) if source.op == "call_function")
    e.replace(node, lambda: e.call(aten.clone.default, other))


def _gain(e: Edit) -> Op:
    """Return a product of what was normalized and a weight; frequencies of positions are multiplied too."""
    weights = e.program.weight_names()
    return e.one(
        e.find(
            "mul",
            where=lambda n: (
                len(inputs_of(n)) == 2
                and any(s.name in weights for s in inputs_of(n))
                and any(comes_from(s, "rsqrt") for other in inputs_of(n) for s in (other, *inputs_of(other)))
            ),
        )
    )


def _norm_skipped(e: Edit) -> None:
    node = e.one(e.find("mul", where=lambda n: comes_from(n, "rsqrt") and len(inputs_of(n)) == 2))
    e.replace(node, lambda: e.call(aten.clone.default, inputs_of(node)[0]))


def _layer_norm_not_centred(e: Edit) -> None:
    node = e.one(e.find("layer_norm"))
    e.feed(node, 0, lambda x: e.call(aten.abs.default, x))


# Activations


def _instead(name: str, target: Any, **kwargs: Any) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        node = e.one(e.find(name, where=is_float))
        e.replace(node, lambda: e.call(target, node.args[0], **kwargs))

    return edit


def _gelu_other_form(e: Edit) -> None:
    node = e.one(e.find("gelu"))
    node.kwargs = {} if node.kwargs.get("approximate") == "tanh" else {"approximate": "tanh"}


def _silu_steeper(e: Edit) -> None:
    e.feed(e.one(e.find("silu")), 0, lambda x: e.call(aten.mul.Tensor, x, 1.01))


def _literal_times(factor: float) -> Callable[[Edit], None]:
    def edit(e: Edit) -> None:
        def has_constant(node: Op) -> bool:
            literal = literal_of(node)
            return literal not in (None, 1.0) and is_float(node) and not is_epsilon(node)

        node = e.one(e.find("mul", "add", "pow", "div", "sub", where=has_constant))
        node.args = tuple(arg * factor if isinstance(arg, float) else arg for arg in node.args)

    return edit


def _gate_up_swapped(e: Edit) -> None:
    node = e.one(e.find("linear", where=lambda n: feeds(n, "silu", "gelu", "relu")))
    source = node.args[0]
    shape = node.args[1].meta["val"].shape
    other = e.one(
        n
        for n in source.users
        if n is not node and op_name(n) == "linear" and n.args[0] is source and n.args[1].meta["val"].shape == shape
    )
    ours, theirs = node.args[1], other.args[1]
    node.update_arg(1, theirs)
    other.update_arg(1, ours)


def _clamp_added(e: Edit) -> None:
    e.rewrite(product(e), lambda x: e.call(aten.clamp.default, x, -1.5, 1.5))


LAYER_MISTAKES = tuple(
    Mistake(name, "graph", edit)
    for name, edit in (
        ("rms_epsilon_x10", _epsilon(10.0)),
        ("rms_epsilon_x1000", _epsilon(1000.0)),
        ("layer_norm_epsilon_x10", _layer_norm_epsilon(10.0)),
        ("layer_norm_epsilon_x1000", _layer_norm_epsilon(1000.0)),
        ("epsilon_outside", _epsilon_outside),
        ("mean_over_one_less", _mean_over_one_less),
        ("mean_wrong_dim", _mean_wrong_dim),
        ("reciprocal_missing", _reciprocal_missing),
        ("gain_plus_one", _gain_plus_one),
        ("gain_dropped", _gain_dropped),
        ("norm_skipped", _norm_skipped),
        ("layer_norm_of_abs", _layer_norm_not_centred),
        ("gelu_other_form", _gelu_other_form),
        ("silu_to_gelu", _instead("silu", aten.gelu.default)),
        ("silu_to_sigmoid", _instead("silu", aten.sigmoid.default)),
        ("gelu_to_relu", _instead("gelu", aten.relu.default)),
        ("relu_to_gelu", _instead("relu", aten.gelu.default)),
        ("tanh_to_sigmoid", _instead("tanh", aten.sigmoid.default)),
        ("silu_steeper", _silu_steeper),
        ("constant_x1.02", _literal_times(1.02)),
        ("constant_x10", _literal_times(10.0)),
        ("gate_up_swapped", _gate_up_swapped),
        ("clamp_added", _clamp_added),
    )
)
