"""Updates that are made of rounding: an optimizer that divides a gradient by its size makes a whole step of any.

The bias of keys, and a bias ahead of a norm, have no gradient: what is computed is rounding, which differs from run to
run, and so does the update of Adam. Two records without a noise floor cannot say that this is right; they can say
that it is all that differs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from glassengine.compare.judge import BY_TOLERANCE
from glassengine.compare.matching.matching import Match
from glassengine.compare.matching.source_wrapper import SourceWrapper
from glassengine.numerics.limits import limits
from glassengine.numerics.metrics.tolerance import tolerance
from glassengine.recording.layout.layout import Entry
from glassengine.results import Hint, Packed

if TYPE_CHECKING:
    from torch import Tensor

_INPUT = ":in[0]"
_PARAMETER, _GRADIENT, _BIAS, _WEIGHT, _TERMS = ":param", ":grad", ".bias:param", ".weight:param", ":grad_out"
# Of an element of a gradient: by so much of itself it is another one on the other side.
_UNSURE = 1e-4
_MOST_STEPS = 16
# Roundings of a weight itself, by which it may differ.
_OWN = 4
_MOST_WRONG = 1024
# Of a step, after which nothing more of it is asked.
_MOST_OTHERS = 8
# The first update of Adam is a whole step, those after it that are recorded are parts of one.
_LARGER = 2
NOT_JUDGED = (
    "its gradients are rounding, of which Adam makes whole steps: not judged without glass record --noise-floor"
)
"""The reason of what is neither ok nor wrong."""


_Places = Mapping[tuple[int, str], Entry]


def rounded_update(match: Match, left: SourceWrapper, right: SourceWrapper) -> tuple[Hint, ...]:
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


def not_judged(pairs: Packed, chosen: Sequence[Match], left: SourceWrapper, right: SourceWrapper) -> list[int]:
    """Return the places of what is wrong as an update of rounding or what reads one, up to the first that is neither.

    That a gradient is rounding is known from its terms: it is no larger than what rounding can leave of their sum, or,
    of a weight, differs by no more than that. A parameter is off by no more than such steps amount to, and a result by
    what the differences of its weight and its bias make of its input.

    Args:
        pairs: All verdicts.
        chosen: What was judged.
        left: The baseline.
        right: The candidate.
    """
    by_step: dict[int, list[int]] = {}
    for i in pairs.flagged() if left.metadata.get("gradients") else ():
        if pairs[i].verdict == "wrong":
            by_step.setdefault(pairs[i].step, []).append(i)
    updates, found = _Updates(chosen, left, right), []
    for step in sorted(by_step):
        own = sorted(by_step[step], key=lambda i: not pairs[i].site.endswith((_BIAS, _WEIGHT)))
        explained, num_other = [], 0
        for i in own if len(own) <= _MOST_WRONG else ():
            is_plain = pairs[i].judged_by == BY_TOLERANCE and chosen[i].rule is None
            if is_plain and updates.explain(chosen[i]):
                explained.append(i)
            elif (num_other := num_other + 1) >= _MOST_OTHERS:
                break
        found += explained
        if len(explained) < len(own):
            break
    return found


class _Updates:
    """Differences of parameters, each proven to be made of rounding.

    Args:
        chosen: What was judged.
        left: The baseline.
        right: The candidate.
    """

    def __init__(self, chosen: Sequence[Match], left: SourceWrapper, right: SourceWrapper) -> None:
        self._chosen, self._left, self._right = chosen, left, right
        self._known: dict[tuple[int, str], Tensor | None] = {}

    def explain(self, match: Match) -> bool:
        """Whether a tensor that is wrong is off by what rounding has made of updates, and by nothing else."""
        entry = match.baseline
        if entry.site.endswith((_BIAS, _WEIGHT)):
            return bool(rounded_update(match, self._left, self._right)) and self._of(match, is_wrong=True) is not None
        before = [(entry.step - 1, entry.site + end) for end in (_BIAS, _WEIGHT)]
        if ":" in entry.site or not any(place in self._matches for place in before):
            return False
        found = _difference(match, self._left, self._right)
        for one in (self._matches[place] for place in before if place in self._matches):
            by = self._of(one)
            if by is not None and by.dim() == 2:
                given = self._places.get((entry.step, entry.site + _INPUT))
                if given is None or self._left.is_assembled or given.shape[-1] != by.shape[-1]:
                    return False
                by = self._left.tensor(given).double() @ by.T
            if found is None or by is None or found.shape[-1:] != by.shape[-1:]:
                return False
            found = found - by
        return found is not None and not bool(_beyond(match, found, self._left).any())

    def _of(self, match: Match, *, is_wrong: bool = False) -> Tensor | None:
        """Return by how much a parameter differs after a step; None where that is not made of rounding."""
        place = match.baseline.step, match.baseline.site
        if place not in self._known:
            is_proven = _is_of_terms if is_wrong and place[1].endswith(_BIAS) else _has_own_gradients
            is_so = is_proven(match, self._left, self._right, self._places)
            self._known[place] = _difference(match, self._left, self._right) if is_so else None
        return self._known[place]

    @functools.cached_property
    def _matches(self) -> Mapping[tuple[int, str], Match]:
        ends = (_BIAS, _WEIGHT)
        return {(one.baseline.step, one.baseline.site): one for one in self._chosen if one.baseline.site.endswith(ends)}

    @functools.cached_property
    def _places(self) -> _Places:
        paths = {site.removesuffix(_BIAS).removesuffix(_WEIGHT) for _, site in self._matches}
        wanted = {path + port for path in paths for port in (_TERMS, _INPUT)}
        return {(one.step, one.site): one for one in self._left.entries if one.site in wanted}


def _difference(match: Match, left: SourceWrapper, right: SourceWrapper) -> Tensor | None:
    for side, own, whole, of in (
        (left, match.baseline, right, match.candidates[0]),
        (right, match.candidates[0], left, match.baseline),
    ):
        side.expect(own, whole, of)
    x, y = left.tensor(match.baseline).double(), right.tensor(match.candidates[0]).double()
    return x - y if x.shape == y.shape else None


def _is_of_terms(match: Match, left: SourceWrapper, right: SourceWrapper, places: _Places) -> bool:
    """Whether all gradients of a bias are rounding of their terms where it differs, and it is off by such steps."""
    entry = match.baseline
    found = _difference(match, left, right)
    if found is None or not _is_of_steps(match, found, left):
        return False
    differs = _beyond(match, found, left)
    for one, _ in _gradients(entry, left, right):
        terms = places.get((one.step, entry.site.removesuffix(_BIAS) + _TERMS))
        if terms is None:
            return False
        each = left.tensor(terms).double().abs()
        sizes = each.reshape(-1, each.shape[-1])
        gradient = left.tensor(one).double().abs()
        if sizes.shape[-1:] != gradient.shape:
            return False
        bound = len(sizes) * limits(one.dtype).eps * sizes.sum(0)
        if bool((differs & (gradient > bound)).any()):
            return False
    return True


def _has_own_gradients(match: Match, left: SourceWrapper, right: SourceWrapper, places: _Places) -> bool:
    """Whether a parameter is off by what its gradients are, step by step, and these by no more than their terms allow.

    An update that divides by the size of a gradient changes by no more than the gradient does, relative to it.
    """
    entry = match.baseline
    found, change = _difference(match, left, right), _largest_change(match, left)
    if found is None or found.dim() > 2 or left.is_assembled or change is None:
        return False
    # Also what is within the absolute part of a tolerance: a result adds up many of them.
    own = _OWN * limits(entry.dtype).eps * (left.tensor(entry).double().abs() + change)
    differs, relative = found.abs() > own, found * 0
    path = entry.site.removesuffix(_WEIGHT).removesuffix(_BIAS)
    for one, other in _gradients(entry, left, right):
        terms, given = (places.get((one.step, path + port)) for port in (_TERMS, _INPUT))
        off = _difference(Match(one, (other,), match.method), left, right)
        if terms is None or given is None or off is None or off.shape != found.shape:
            return False
        sizes, inputs = (left.tensor(each).double().abs().flatten(0, -2) for each in (terms, given))
        inputs = inputs if found.dim() == 2 else sizes.new_ones(len(sizes), 1)
        if len(sizes) != len(inputs) or found.shape != (sizes.shape[-1], inputs.shape[-1])[: found.dim()]:
            return False
        sums = (sizes.T @ inputs).reshape(found.shape)
        if bool((differs & (off.abs() > len(sizes) * limits(one.dtype).eps * sums)).any()):
            return False
        relative += (off / left.tensor(one).double()).abs().nan_to_num(0.0).clamp(max=2.0)
    return not bool((differs & (found.abs() > _LARGER * change * relative + own)).any())


def _is_of_steps(match: Match, found: Tensor, left: SourceWrapper) -> bool:
    """Whether a parameter is off by no more than the steps amount to that it, or the weight beside it, has made."""
    entry, change = match.baseline, _largest_change(match, left)
    count = entry.step - min(one.step for one in left.entries if one.site == entry.site) + 1
    allowed = tolerance(entry.dtype, match.candidates[0].dtype)
    return change is not None and float(found.abs().max()) <= 2 * _LARGER * count * change + allowed.atol


def _largest_change(match: Match, left: SourceWrapper) -> float | None:
    """Return the largest step of a parameter, or of the weight beside it; None where no two steps are recorded."""
    site = match.baseline.site
    updates = [_values(left, each) for each in (site, site.removesuffix(_BIAS) + _WEIGHT)]
    return max((float((b - a).abs().max()) for each in updates for a, b in itertools.pairwise(each)), default=None)


def _beyond(match: Match, found: Tensor, left: SourceWrapper) -> Tensor:
    allowed = tolerance(match.baseline.dtype, match.candidates[0].dtype)
    return found.abs() > allowed.atol + allowed.rtol * left.tensor(match.baseline).double().abs()


def _values(side: SourceWrapper, site: str) -> list[Tensor]:
    of_site = sorted((one for one in side.entries if one.site == site), key=lambda one: one.step)
    return [side.tensor(one).double() for one in of_site[:_MOST_STEPS]]


def _differ(g: Tensor, h: Tensor, one: Entry, other: Entry) -> bool:
    allowed = tolerance(one.dtype, other.dtype)
    return bool(((g - h).abs() > allowed.atol + allowed.rtol * g.abs()).any())


def _gradients(entry: Entry, left: SourceWrapper, right: SourceWrapper) -> Sequence[tuple[Entry, Entry]]:
    """Return the last gradients that an update may be made of, on both sides."""
    site = entry.site.removesuffix(_PARAMETER) + _GRADIENT
    theirs = {one.step: one for one in right.entries if one.site == site}
    ours = [one for one in left.entries if one.site == site and one.step <= entry.step and one.step in theirs]
    return [(one, theirs[one.step]) for one in ours[-_MOST_STEPS:]]
