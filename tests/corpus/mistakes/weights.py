"""Kinds of mistake in weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.corpus.edits import DoesNotApply, Edit, Mistake
from tests.corpus.places import product


def _matrix(change: Callable[[Edit, Tensor], Tensor]) -> Callable[[Edit], None]:
    """Change the matrix of one product."""

    def edit(e: Edit) -> None:
        name = e.weight_of(product(e), dims=2)
        value = e.value_of(name)
        e.weights[name] = change(e, value).to(value.dtype).contiguous()

    return edit


def _vector(change: Callable[[Edit, Tensor], Tensor]) -> Callable[[Edit], None]:
    """Change a bias or the gain of a norm."""

    def edit(e: Edit) -> None:
        used = e.find("mul", "add", "addmm", "linear", "layer_norm", "batch_norm")
        vectors = []
        for node in used:
            try:
                vectors.append(e.weight_of(node, dims=1))
            except DoesNotApply:
                continue
        if not vectors:
            raise DoesNotApply
        name = e.random.choice(vectors)
        e.weights[name] = change(e, e.value_of(name))

    return edit


def _at(e: Edit, value: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """Change one element that is neither the largest nor tiny."""
    flat = value.flatten()
    order = flat.abs().argsort(descending=True)
    index = int(order[e.random.randrange(len(flat) // 8, len(flat) // 3)])
    flat[index] = change(flat[index])
    return flat.reshape(value.shape)


def _row(e: Edit, value: Tensor, factor: float) -> Tensor:
    value[e.random.randrange(value.shape[0])] *= factor
    return value


def _quantised(value: Tensor, levels: int) -> Tensor:
    scale = value.float().abs().amax(-1, keepdim=True).clamp(min=1e-9) / levels
    return (value.float() / scale).round() * scale


def _transposed(e: Edit) -> None:
    """A square matrix is stored the other way round."""
    names = e.program.weight_names()
    square = [
        node
        for node in e.find("linear", "addmm", "mm")
        if any(
            s.name in names and s.meta["val"].dim() == 2 and s.meta["val"].shape[0] == s.meta["val"].shape[1]
            for s in node.all_input_nodes
        )
    ]
    name = e.weight_of(e.one(square), dims=2)
    e.weights[name] = e.value_of(name).T.contiguous()


def _other_weight(e: Edit) -> None:
    """A matrix of the same shape from elsewhere, another layer perhaps."""
    name = e.weight_of(product(e), dims=2)
    shape = e.value_of(name).shape
    others = [other for other, value in e.program.exported.state_dict.items() if other != name and value.shape == shape]
    if not others:
        raise DoesNotApply
    e.weights[name] = e.value_of(e.random.choice(others))


def _rope_base(e: Edit) -> None:
    names = [name for name in e.program.weight_names().values() if name.endswith("inv_freq") and "original" not in name]
    if not names:
        raise DoesNotApply
    e.weights[names[0]] = e.value_of(names[0]) * 0.99


def _embedding_shifted(e: Edit) -> None:
    name = e.weight_of(e.one(e.find("embedding")), dims=2)
    e.weights[name] = e.value_of(name).roll(1, 0)


def _kernel_flipped(e: Edit) -> None:
    name = e.weight_of(e.one(e.find("conv1d", "conv2d", "convolution")))
    e.weights[name] = e.value_of(name).flip(-1)


def _statistics_stale(e: Edit) -> None:
    names = [name for name in e.program.weight_names().values() if name.endswith(("running_mean", "running_var"))]
    if not names:
        raise DoesNotApply
    name = e.random.choice(names)
    e.weights[name] = e.value_of(name) * 1.05 + 0.01


WEIGHT_MISTAKES = tuple(
    Mistake(name, "weights", edit)
    for name, edit in (
        ("weight_transposed", _transposed),
        ("weight_of_another", _other_weight),
        ("weight_exponent_bit", _matrix(lambda e, w: _at(e, w, lambda x: x * 4))),
        ("weight_sign_flip", _matrix(lambda e, w: _at(e, w, lambda x: -x))),
        ("weight_nan", _matrix(lambda e, w: _at(e, w, lambda x: float("nan")))),
        ("weight_row_zero", _matrix(lambda e, w: _row(e, w, 0.0))),
        ("weight_row_x1.01", _matrix(lambda e, w: _row(e, w, 1.01))),
        ("weight_x1.001", _matrix(lambda e, w: w.float() * 1.001)),
        ("weight_x1.01", _matrix(lambda e, w: w.float() * 1.01)),
        ("weight_zero", _matrix(lambda e, w: w * 0)),
        ("weight_rows_swapped", _matrix(lambda e, w: w.roll(1, 0))),
        ("weight_stale", _matrix(lambda e, w: w + 0.02 * w.roll(1, 0).roll(1, 1))),
        ("weight_int4", _matrix(lambda e, w: _quantised(w, 7))),
        ("weight_int8", _matrix(lambda e, w: _quantised(w, 127))),
        ("vector_x1.05", _vector(lambda e, w: w * 1.05)),
        ("vector_one_element", _vector(lambda e, w: _at(e, w, lambda x: x * 1.25))),
        ("rope_base", _rope_base),
        ("embedding_shifted", _embedding_shifted),
        ("kernel_flipped", _kernel_flipped),
        ("statistics_stale", _statistics_stale),
    )
)
