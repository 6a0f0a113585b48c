"""Updates that are made of rounding: an optimizer that divides a gradient by its size makes a whole step of any.

The bias of keys, and a bias ahead of a norm, have no gradient: what is computed is rounding, which differs from run to
run, and so does the update of Adam. Two records without a noise floor cannot say that this is right; they can say
that it is all that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from glassengine.compare.matching.matching import Match
from glassengine.compare.ranks.findings import Findings
from glassengine.numerics.metrics.tolerance import tolerance
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.results import Hint

if TYPE_CHECKING:
    from torch import Tensor

_PARAMETER, _GRADIENT = ":param", ":grad"
# Of an element of a gradient: by so much of itself it is another one on the other side.
_UNSURE = 1e-4
_MOST_STEPS = 16


def rounded_update(match: Match, left: TensorSource, right: TensorSource) -> tuple[Hint, ...]:
    """Return that a parameter differs where its gradients are rounding, and nowhere else.

    Args:
        match: A pair that was judged wrong.
        left: The baseline.
        right: The candidate.
    """
    entry, other = match.baseline, match.candidates[0]
    if match.rule is not None or not entry.site.endswith(_PARAMETER):
        return ()
    x, y = left.tensor(entry).double(), right.tensor(other).double()
    if x.shape != y.shape:
        return ()
    allowed = tolerance(entry.dtype, other.dtype)
    differs = (x - y).abs() > allowed.atol + allowed.rtol * x.abs()
    unsure = None
    for one, counterpart in _gradients(entry, left, right):
        for side, own, whole, of in ((left, one, right, counterpart), (right, counterpart, left, one)):
            if isinstance(side, Findings):
                side.expect(own, whole, of)
        g, h = left.tensor(one).double(), right.tensor(counterpart).double()
        if g.shape != x.shape or h.shape != x.shape or _differ(g, h, one, counterpart):
            return ()
        found = (g - h).abs() > _UNSURE * g.abs().maximum(h.abs())
        unsure = found if unsure is None else unsure | found
    if unsure is None or not bool(differs.any()) or bool((differs & ~unsure).any()):
        return ()
    text = f"{int(differs.sum())} of {x.numel()} elements differ, whose gradients are rounding: an optimizer that"
    text += " divides by their size (Adam) makes whole steps of them; --noise-floor records what rounding does"
    return (Hint("other", text, 0.9, evidence="values"),)


def _differ(g: Tensor, h: Tensor, one: Entry, other: Entry) -> bool:
    allowed = tolerance(one.dtype, other.dtype)
    return bool(((g - h).abs() > allowed.atol + allowed.rtol * g.abs()).any())


def _gradients(entry: Entry, left: TensorSource, right: TensorSource) -> Sequence[tuple[Entry, Entry]]:
    """Return the last gradients that an update may be made of, on both sides."""
    site = entry.site.removesuffix(_PARAMETER) + _GRADIENT
    theirs = {one.step: one for one in right.entries if one.site == site}
    ours = [one for one in left.entries if one.site == site and one.step <= entry.step and one.step in theirs]
    return [(one, theirs[one.step]) for one in ours[-_MOST_STEPS:]]
