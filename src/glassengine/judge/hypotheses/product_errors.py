"""What the error of a product shows: that it was summed coarsely, or that its weights are others.

Rounding on the way goes its own way in each row: two rows that are alike have errors that are not. An error of weights
is a linear function of the input, and rows that are alike have errors that are alike. How alike rows are for a linear
function is measured with random weights instead of the right ones.

    sum over pairs of rows (i, j):   slope = <cos(E_i, E_j), c_ij> / <c, c>,   c_ij = mean over probes cos(P_i, P_j)

is 1 for weights that are off at random and 0 for rounding, up to 1 / (|c| sqrt(columns)).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.hypotheses.ask import Asked
from glassengine.judge.hypotheses.trials.trial import FAILS, Call, Trial
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of

_COARSE = (torch.bfloat16, torch.float16)
_TF32_BITS = 10
_MOST_ROWS = 128
_NUM_PROBES = 4
_SAME_ROW = 0.999
"""From this cosine on two rows are one row twice, whose errors are alike however they are rounded."""
_FOLLOWS = 0.25
"""From this slope on an error follows its input."""
_POWER = 3.0
"""A slope of 0 is known so many times better than a slope of `_FOLLOWS` is away from it."""
_EXPLAINED = 0.1
"""Share of the error that rounded operands may leave."""


def is_summed_coarsely(asked: Asked, node: Node, actual: Tensor) -> bool | None:
    """Return whether the error of a product is that of coarse sums; None where its values do not tell.

    Args:
        asked: What is known of the side in this step.
        node: A product of the baseline.
        actual: What the candidate made in its place.
    """
    piece = asked.piece(node)
    if piece is None:
        return None
    try:
        trial = Trial(piece)
    except FAILS:
        return None
    weights = asked.program.weights()
    if trial.end.name != node.name or trial.right.shape != actual.shape:
        return None
    call = trial.call(trial.end)
    error = actual.double() - trial.right
    if not bool(error.isfinite().all()):
        return None
    if _is_of_rounded_operands(call, error):
        return True
    held = [place for place, source in enumerate(trial.end.args) if getattr(source, "name", None) in weights]
    return _is_independent(call, held, error) if held else None


def _is_of_rounded_operands(call: Call, error: Tensor) -> bool:
    """Whether the product of operands that were rounded first is what the candidate made."""
    size = float(error.square().mean())
    for rounded in (*(lambda t, d=d: t.to(d).double() for d in _COARSE), _to_tf32):
        try:
            made = call.again(*(rounded(a) if _is_operand(a) else a for a in call.args), **call.kwargs)
        except FAILS:
            continue
        if float((made - call.value - error).square().mean()) <= _EXPLAINED**2 * size:
            return True
    return False


def _is_operand(value: object) -> bool:
    # A bias is added to the sums.
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def _to_tf32(value: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp((mantissa * 2 ** (_TF32_BITS + 1)).round() / 2 ** (_TF32_BITS + 1), exponent)


def _is_independent(call: Call, held: list[int], error: Tensor) -> bool | None:
    """Whether errors of rows that are alike are not alike; None where too few rows are alike to tell."""
    weight = next((place for place in held if call.args[place].dim() > 1), None)
    if weight is None:
        return None
    axis = 1 if traits_of(call.node).rounding is Rounding.CONVOLUTION else -1
    generator = torch.Generator().manual_seed(0)
    alike = torch.zeros(())
    for _ in range(_NUM_PROBES):
        drawn = torch.randn(call.args[weight].shape, generator=generator, dtype=torch.float64)
        args = [drawn if place == weight else a for place, a in enumerate(call.args)]
        # What is added to the sums is no part of the probe.
        args = [torch.zeros_like(a) if isinstance(a, Tensor) and a.dim() == 1 else a for a in args]
        try:
            made = call.again(*args, **call.kwargs)
        except FAILS:
            return None
        alike = alike + _cosines(made, axis) / _NUM_PROBES
    of_error = _cosines(error, axis)
    rows = torch.ones_like(of_error, dtype=torch.bool).triu(1)
    rows &= (alike.abs() < _SAME_ROW) & alike.isfinite() & of_error.isfinite()
    c, e = alike[rows], of_error[rows]
    size = float(c.norm())
    if not size:
        return None
    uncertainty = 1 / (size * math.sqrt(error.shape[axis]))
    if _POWER * uncertainty > _FOLLOWS:
        return None
    return float(c @ e) / size**2 < _FOLLOWS


def _cosines(value: Tensor, axis: int) -> Tensor:
    rows = value.movedim(axis, -1).flatten(0, -2)
    if rows.shape[0] > _MOST_ROWS:
        rows = rows[torch.linspace(0, rows.shape[0] - 1, _MOST_ROWS).long()]
    unit = rows / rows.norm(dim=-1, keepdim=True)
    found: Tensor = unit @ unit.mT
    return found
