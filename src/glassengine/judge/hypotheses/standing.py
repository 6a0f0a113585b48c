"""How good an explanation is: one that settles the question ends the search, a weaker one is kept beside it.

Several mistakes may make one tensor. What leaves more than a proof does, says of another op only that it is another, or
is written off the candidate's tensor itself (elements that are zero, a number beyond which nothing lies, an order of
its slices) describes what came out as well as what was done: a mistake that says what was done, and makes the same, is
the better one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from enum import IntEnum
from typing import Any

from glassengine.judge.graphs.between import ancestors
from glassengine.judge.hypotheses.mistakes.arguments import another_op, one_for_several
from glassengine.judge.hypotheses.mistakes.layouts import permuted_operands
from glassengine.judge.hypotheses.mistakes.parts import cut_off, dropped, parts, zeroed
from glassengine.judge.hypotheses.mistakes.solved import solved, stretched
from glassengine.judge.hypotheses.mistakes.wholes import another_tensor, done_twice, rearranged, scaled
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.program.representation.naming import op_name
from glassengine.results import Hint

_MAKER_WITHIN = 6
"""Steps above the candidate's tensor within which the op stands that made it what it is."""
_DESCRIBED: dict[Callable[..., Any], frozenset[str]] = {
    cut_off: frozenset({"clamp", "clamp_min", "clamp_max", "minimum", "maximum", "relu", "hardtanh", "relu6"}),
    dropped: frozenset({"dropout", "native_dropout", "bernoulli", "rand", "rand_like", "alpha_dropout"}),
    zeroed: frozenset({"slice", "narrow", "constant_pad_nd", "pad", "zeros", "zeros_like", "new_zeros", "where"}),
    rearranged: frozenset({"roll", "flip", "index_select", "index", "gather", "take_along_dim"}),
    parts: frozenset({"index_put", "index_copy", "slice_scatter", "select_scatter", "copy", "cat", "where"}),
    permuted_operands: frozenset(),
    solved: frozenset(),
    stretched: frozenset(),
    scaled: frozenset(),
    done_twice: frozenset(),
    another_tensor: frozenset(),
}
"""Families that describe -> ops one of which a candidate has that does that; none: whatever it has may do it."""


class Standing(IntEnum):
    """How much an explanation settles, least first."""

    NEARLY = 0
    TOGETHER = 1
    DESCRIBED = 2
    FITS = 3
    DONE = 4
    SETTLED = 5


def standing_of(family: Callable[..., Any], hint: Hint) -> Standing:
    """Return how much a mistake settles that explains."""
    is_described = family in _DESCRIBED
    if not hint.proven:
        return Standing.NEARLY if is_described or hint.kind == "other" else Standing.FITS
    if is_described:
        return Standing.DESCRIBED
    is_another = family in (another_op, one_for_several) and hint.kind == "other"
    return Standing.DONE if is_another else Standing.SETTLED


def as_certain(question: Question, family: Callable[..., Any], hint: Hint) -> Hint:
    """Return a hint that is certain only if the ops of the candidate bear it out, where it describes what came out."""
    makers: Collection[str] = _DESCRIBED.get(family, ())
    # A factor is a description that any product bears out.
    if not hint.proven or not makers or not question.theirs or hint.kind == "scale":
        return hint
    end = question.theirs[-1]
    near = {op_name(node) for node in {*question.theirs, *ancestors(end, _MAKER_WITHIN)} if node.op == "call_function"}
    return hint if near & set(makers) else dataclasses.replace(hint, proven=False)
