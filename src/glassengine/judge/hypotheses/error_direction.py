"""Hints from the direction of an error as large as rounding: a literal, coarse sums, other weights.

If the candidate computes with another number, its error is the difference that this number makes, once, in every part
of the tensor. Rounding is a share of that difference near zero, or another one in each part. A number that is written
elsewhere on both sides (an epsilon beside a root, a scale on the queries) changes nothing, so its share is zero.

Rounding of a product goes its own way in each row: two rows that are alike have errors that are not. An error of
weights is a linear function of the input, and rows that are alike have errors that are alike. How alike rows are for a
linear function is measured with random weights instead of the right ones.

    sum over pairs of rows (i, j):   slope = <cos(E_i, E_j), c_ij> / <c, c>,   c_ij = mean over probes cos(P_i, P_j)

is 1 for weights that are off at random and 0 for rounding, up to 1 / (|c| sqrt(columns)).
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.hypotheses.explain import hint_of
from glassengine.judge.hypotheses.mistake_search import MistakeSearch
from glassengine.judge.hypotheses.mistakes.arguments import as_theirs, same_op
from glassengine.judge.hypotheses.mistakes.global_transforms import to_tf32
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import FAILS, OutOfWork, Trial, TrialCall
from glassengine.numerics.float64 import is_real
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.results import Hint

_PARTS, _LEAST_PARTS, _LEAST_ELEMENTS = 16, 8, 16
_WHOLE, _PART = 0.2, 0.5
"""By how much the share of the difference may be from one: over all elements, and in each part."""
_NEARER = 1.4
"""What is left is smaller by this factor than with the baseline's number."""
_COUNTS = 0.01
"""Parts in which the number makes less difference than this share of the mean say nothing (rows that see one key)."""
_SCORE = 0.9
_COARSE = (torch.bfloat16, torch.float16)
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


@torch.no_grad()
def literal_shown(search: MistakeSearch, node: Node, actual: Tensor, valid: Tensor | None) -> Hint | None:
    """Return the number of the candidate that makes the error of an op; None where none of its numbers does.

    Args:
        search: What is known of both sides.
        node: Of the baseline, suspicious.
        actual: What the candidate made.
        valid: Mask of the elements that count; None for all.
    """
    piece = search.piece(node)
    question = None if piece is None else search.question(node, piece, actual, valid)
    if question is None or not question.theirs:
        return None
    try:
        for hypothesis in itertools.chain(same_op(question), as_theirs(question, is_turned=True)):
            made = question.trial.changed(hypothesis.edits)
            if made is not None and is_shown(question, made):
                return hint_of(question, hypothesis, made, _SCORE, "argument")
    except (OutOfWork, *FAILS):
        return None
    return None


def is_shown(question: Question, made: Tensor) -> bool:
    """Whether the candidate's error is, in every part of the tensor, the difference that a changed piece makes."""
    right, actual = question.right, question.actual
    if not made.shape == right.shape == actual.shape or not made.is_floating_point():
        return False
    keep = made.isfinite() & right.isfinite() & actual.isfinite()
    keep = keep if question.valid is None else keep & question.valid
    difference, error = (made - right)[keep].double(), (actual - right)[keep].double()
    number = min(_PARTS, len(error) // _LEAST_ELEMENTS)
    if number < _LEAST_PARTS or question.left(made) * _NEARER > question.of_right:
        return False
    parts = zip(difference.tensor_split(number), error.tensor_split(number), strict=True)
    sums = torch.tensor([[float(d @ d), float(d @ e)] for d, e in parts], dtype=torch.float64)
    counting = sums[sums[:, 0] > _COUNTS * sums[:, 0].mean()]
    if len(counting) < _LEAST_PARTS:
        return False
    shares = counting[:, 1] / counting[:, 0]
    whole = float(counting[:, 1].sum() / counting[:, 0].sum())
    return abs(whole - 1) <= _WHOLE and bool(((shares - 1).abs() <= _PART).all())


def is_summed_coarsely(search: MistakeSearch, node: Node, actual: Tensor) -> bool | None:
    """Return whether the error of a product is that of coarse sums; None where its values do not tell.

    Args:
        search: What is known of the side in this step.
        node: A product of the baseline.
        actual: What the candidate made in its place.
    """
    piece = search.piece(node)
    if piece is None:
        return None
    try:
        trial = Trial(piece)
    except FAILS:
        return None
    weights = search.program.weights()
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


def _is_of_rounded_operands(call: TrialCall, error: Tensor) -> bool:
    """Whether the product of operands that were rounded first is what the candidate made."""
    size = float(error.square().mean())
    for rounded in (*(lambda t, d=d: t.to(d).double() for d in _COARSE), to_tf32):
        try:
            # A bias is added to the sums.
            args = (rounded(a) if is_real(a) and a.dim() > 1 else a for a in call.args)
            made = call.target(*args, **call.kwargs)
        except FAILS:
            continue
        if float((made - call.value - error).square().mean()) <= _EXPLAINED**2 * size:
            return True
    return False


def _is_independent(call: TrialCall, held: list[int], error: Tensor) -> bool | None:
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
            made = call.target(*args, **call.kwargs)
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
