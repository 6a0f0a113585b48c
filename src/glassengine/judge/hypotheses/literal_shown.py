"""A literal that only the candidate has, of which the arithmetic shows that it made the error of a suspicious op.

In half precision an error may have about the size of rounding. Its direction shows which of the two it is: if the
candidate computes with the other number, its error is the difference that this number makes, once, in every part of the
tensor. Rounding is a share of that difference near zero, or another one in each part. A number that is written
elsewhere on both sides (an epsilon beside a root, a scale on the queries) changes nothing, so its share is zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.hypotheses.ask import Asked
from glassengine.judge.hypotheses.explain import change_of
from glassengine.judge.hypotheses.mistakes.argument_values import fitting, is_whole
from glassengine.judge.hypotheses.mistakes.arguments import becoming, literals, same_op
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import FAILS, OutOfWork
from glassengine.results import Hint

_PARTS, _LEAST_PARTS, _LEAST_ELEMENTS = 16, 8, 16
_WHOLE, _PART = 0.2, 0.5
"""By how much the share of the difference may be from one: over all elements, and in each part."""
_NEARER = 1.4
"""What is left is smaller by this factor than with the baseline's number."""
_COUNTS = 0.01
"""Parts in which the number makes less difference than this share of the mean say nothing (rows that see one key)."""
_SCORE = 0.9


@torch.no_grad()
def literal_shown(asked: Asked, node: Node, actual: Tensor, valid: Tensor | None) -> Hint | None:
    """Return the number of the candidate that makes the error of an op; None where none of its numbers does.

    Args:
        asked: What is known of both sides.
        node: Of the baseline, suspicious.
        actual: What the candidate made.
        valid: Mask of the elements that count; None for all.
    """
    piece = asked.piece(node)
    question = None if piece is None else asked.question(node, piece, actual, valid)
    if question is None or not question.theirs:
        return None
    try:
        for hypothesis in _theirs(question):
            made = question.trial.changed(hypothesis.edits)
            if made is not None and is_shown(question, made):
                left, change = question.unexplained(made), change_of(question, hypothesis)
                return Hint(hypothesis.kind, hypothesis.text, _SCORE, "argument", change=change, unexplained=left)
    except (OutOfWork, *FAILS):
        return None
    return None


def _theirs(question: Question) -> Iterator[Hypothesis]:
    """Yield the numbers that the candidate's own ops have, a divisor as the factor that it is as well."""
    yield from same_op(question)
    own = [value for value in question.their_values if not is_whole(value)]
    numbers = [value for value in question.their_values if isinstance(value, (int, float)) and value]
    for literal in literals(question):
        turned = [1 / value for value in numbers] if literal.name == "scale" or isinstance(literal.value, float) else []
        for value in [*own, *turned]:
            value = fitting(literal, value)
            if value is not None:
                yield becoming(question, literal, value)


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
