"""Updates that are made of rounding: an optimizer that divides a gradient by its size makes a whole step of any.

The bias of keys, and a bias ahead of a norm, have no gradient: what is computed is rounding, which differs from run to
run, and so does the update of Adam. Two records without a noise floor cannot say that this is right; they can say
that it is all that differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from glassengine.compare.matching.matching import Match
from glassengine.compare.ranks.findings import Findings
from glassengine.compare.ruling import BY_TOLERANCE
from glassengine.numerics.limits import limits
from glassengine.numerics.metrics.tolerance import tolerance
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.results import Hint, Packed

if TYPE_CHECKING:
    from torch import Tensor

_PARAMETER, _GRADIENT, _BIAS, _WEIGHT, _TERMS = ":param", ":grad", ".bias:param", ".weight:param", ":grad_out"
# Of an element of a gradient: by so much of itself it is another one on the other side.
_UNSURE = 1e-4
_MOST_STEPS = 16
_MOST_WRONG = 4096
# The first update of Adam is a whole step, those after it that are recorded are parts of one.
_LARGER = 2
NOT_JUDGED = (
    "its gradients are rounding, of which Adam makes whole steps: not judged without glass record --noise-floor"
)
"""The reason of what is neither ok nor wrong."""


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


def not_judged(pairs: Packed, chosen: Sequence[Match], left: TensorSource, right: TensorSource) -> list[int]:
    """Return the places of all that is wrong, where each is an update of rounding or what reads one; else none.

    That a gradient is rounding is known from its terms: it is no larger than what rounding can leave of their sum. A
    parameter is off by no more than such steps amount to, and a result by the difference of its bias alone.

    Args:
        pairs: All verdicts.
        chosen: What was judged.
        left: The baseline.
        right: The candidate.
    """
    wrong = [i for i in pairs.flagged() if pairs[i].verdict == "wrong"]
    sites = {chosen[i].baseline.site for i in wrong}
    biases = {site for site in sites if site.endswith(_BIAS)}
    read = {site + _BIAS for site in sites - biases}
    if not biases or not read <= biases or len(wrong) > _MOST_WRONG:
        return []
    if any(pairs[i].judged_by != BY_TOLERANCE or chosen[i].rule is not None for i in wrong):
        return []
    known: dict[str, list[tuple[int, Tensor]]] = {}
    for i in sorted(wrong, key=lambda i: (chosen[i].baseline.step, not chosen[i].baseline.site.endswith(_BIAS))):
        entry = chosen[i].baseline
        if entry.site in biases:
            if not rounded_update(chosen[i], left, right) or not _is_of_terms(entry, chosen[i], left, right):
                return []
            found = _difference(chosen[i], left, right)
            assert found is not None
            known.setdefault(entry.site, []).append((entry.step, found))
        elif not _is_of_bias(chosen[i], known.get(entry.site + _BIAS, ()), left, right):
            return []
    return wrong


def _difference(match: Match, left: TensorSource, right: TensorSource) -> Tensor | None:
    for side, own, whole, of in (
        (left, match.baseline, right, match.candidates[0]),
        (right, match.candidates[0], left, match.baseline),
    ):
        if isinstance(side, Findings):
            side.expect(own, whole, of)
    x, y = left.tensor(match.baseline).double(), right.tensor(match.candidates[0]).double()
    return x - y if x.shape == y.shape else None


def _is_of_terms(entry: Entry, match: Match, left: TensorSource, right: TensorSource) -> bool:
    """Whether where a parameter differs all its gradients are rounding of their terms, and it is off by such steps."""
    found = _difference(match, left, right)
    updates = [_values(left, site) for site in (entry.site, entry.site.removesuffix(_BIAS) + _WEIGHT)]
    changes = [float((b - a).abs().max()) for each in updates for a, b in itertools.pairwise(each)]
    if found is None or not changes:
        return False
    off, count = found.abs(), entry.step - min(one.step for one in left.entries if one.site == entry.site) + 1
    allowed = tolerance(entry.dtype, match.candidates[0].dtype)
    differs = off > allowed.atol + allowed.rtol * left.tensor(entry).double().abs()
    if float(off.max()) > 2 * _LARGER * count * max(changes) + allowed.atol:
        return False
    of_terms = entry.site.removesuffix(_BIAS) + _TERMS
    terms = {one.step: one for one in left.entries if one.site == of_terms}
    for one, _ in _gradients(entry, left, right):
        if one.step not in terms:
            return False
        each = left.tensor(terms[one.step]).double().abs()
        sizes = each.reshape(-1, each.shape[-1])
        gradient = left.tensor(one).double().abs()
        if sizes.shape[-1:] != gradient.shape:
            return False
        bound = len(sizes) * limits(one.dtype).eps * sizes.sum(0)
        if bool((differs & (gradient > bound)).any()):
            return False
    return True


def _values(side: TensorSource, site: str) -> list[Tensor]:
    of_site = sorted((one for one in side.entries if one.site == site), key=lambda one: one.step)
    return [side.tensor(one).double() for one in of_site[:_MOST_STEPS]]


def _is_of_bias(match: Match, known: Sequence[tuple[int, Tensor]], left: TensorSource, right: TensorSource) -> bool:
    """Whether a result differs by what its bias did after the step before, and by no more than rounding else."""
    entry, other = match.baseline, match.candidates[0]
    bias = next((found for step, found in reversed(known) if step == entry.step - 1), None)
    found = _difference(match, left, right)
    if bias is None or found is None or found.shape[-1:] != bias.shape:
        return False
    rest = (found - bias).abs()
    allowed = tolerance(entry.dtype, other.dtype)
    return not bool((rest > allowed.atol + allowed.rtol * left.tensor(entry).double().abs()).any())


def _differ(g: Tensor, h: Tensor, one: Entry, other: Entry) -> bool:
    allowed = tolerance(one.dtype, other.dtype)
    return bool(((g - h).abs() > allowed.atol + allowed.rtol * g.abs()).any())


def _gradients(entry: Entry, left: TensorSource, right: TensorSource) -> Sequence[tuple[Entry, Entry]]:
    """Return the last gradients that an update may be made of, on both sides."""
    site = entry.site.removesuffix(_PARAMETER) + _GRADIENT
    theirs = {one.step: one for one in right.entries if one.site == site}
    ours = [one for one in left.entries if one.site == site and one.step <= entry.step and one.step in theirs]
    return [(one, theirs[one.step]) for one in ours[-_MOST_STEPS:]]
