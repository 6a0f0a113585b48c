"""Updates that are made of rounding: an optimizer that divides a gradient by its size makes a whole step of any.

The bias of keys, and a bias ahead of a norm, have no gradient: what is computed is rounding, which differs from run to
run, and so does the update of Adam. Two records without a noise floor cannot say that this is right; they can say
that it is all that differs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from glassengine.blocks.arrays import Array
from glassengine.compare.judge import BY_TOLERANCE
from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.matching.source_wrapper import SourceWrapper
from glassengine.numerics.limits import limits
from glassengine.numerics.tolerance import tolerance
from glassengine.recording.layout.layout import Entry
from glassengine.results import Hint, Packed

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


def rounded_update(match: MatchedPair, left: SourceWrapper, right: SourceWrapper) -> tuple[Hint, ...]:
    """Return that a parameter differs where its gradients are rounding, and nowhere else.

    Args:
        match: A pair that was judged wrong.
        left: The baseline.
        right: The candidate.
    """
    entry, other = match.baseline, match.candidates[0]
    if match.rule is not None or not entry.site.endswith(_PARAMETER):
        return ()
    both, gradients = _values(entry, other, left, right), _gradients(entry, left, right)
    if both is None or not gradients:
        return ()
    differs, unsure = _beyond(*both, entry, other), np.zeros(both[0].shape, bool)
    for one, counterpart in gradients:
        found = _values(one, counterpart, left, right)
        if found is None or found[0].shape != unsure.shape or _beyond(*found, one, counterpart).any():
            return ()
        g, h = found
        unsure |= np.abs(g - h) > _UNSURE * np.maximum(np.abs(g), np.abs(h))
    if not differs.any() or (differs & ~unsure).any():
        return ()
    text = f"{int(differs.sum())} of {differs.size} elements differ, whose gradients are rounding: an optimizer that"
    text += " divides by their size (Adam) makes whole steps of them; --noise-floor records what rounding does"
    return (Hint("other", text, 0.9, evidence="values"),)


def not_judged(pairs: Packed, chosen: Sequence[MatchedPair], left: SourceWrapper, right: SourceWrapper) -> list[int]:
    """Return the places of what is wrong as an update of rounding or what reads one, up to the first that is neither.

    That a gradient is rounding is known from its terms: it differs by no more than rounding can leave of their sum. A
    parameter is off by no more than such steps amount to, and a result by what the differences of its weight and its
    bias make of its input.

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

    def __init__(self, chosen: Sequence[MatchedPair], left: SourceWrapper, right: SourceWrapper) -> None:
        self._chosen, self._left, self._right = chosen, left, right
        self._known: dict[tuple[int, str], Array | None] = {}

    def explain(self, match: MatchedPair) -> bool:
        """Whether a tensor that is wrong is off by what rounding has made of updates, and by nothing else."""
        entry = match.baseline
        if entry.site.endswith((_BIAS, _WEIGHT)):
            return bool(rounded_update(match, self._left, self._right)) and self._of(match) is not None
        before = [(entry.step - 1, entry.site + end) for end in (_BIAS, _WEIGHT)]
        if ":" in entry.site or not any(place in self._matches for place in before):
            return False
        both = _values(entry, match.candidates[0], self._left, self._right)
        if both is None:
            return False
        x, y = both
        for one in (self._matches[place] for place in before if place in self._matches):
            by = self._of(one)
            if by is not None and by.ndim == 2:
                given = self._places.get((entry.step, entry.site + _INPUT))
                if given is None or self._left.is_assembled or given.shape[-1] != by.shape[-1]:
                    return False
                by = _wide(self._left, given) @ by.T
            if by is None or x.shape[-1:] != by.shape[-1:]:
                return False
            y = y + by
        return not _beyond(x, y, entry, match.candidates[0]).any()

    def _of(self, match: MatchedPair) -> Array | None:
        """Return by how much a parameter differs after a step; None where that is not made of rounding."""
        place = match.baseline.step, match.baseline.site
        if place not in self._known:
            self._known[place] = self._rounding(match)
        return self._known[place]

    def _rounding(self, match: MatchedPair) -> Array | None:
        """Return by how much a parameter is off, if by what its gradients are, and these by what their terms allow.

        An update that divides by the size of a gradient changes by no more than the gradient does, relative to it.
        """
        entry, left, right = match.baseline, self._left, self._right
        both, change = _values(entry, match.candidates[0], left, right), self._largest_change(entry.site)
        if both is None or both[0].ndim > 2 or left.is_assembled or change is None:
            return None
        found, eps = both[0] - both[1], limits(entry.dtype).eps
        # Also what is within the absolute part of a tolerance: a result adds up many of them.
        own = _OWN * eps * (np.abs(both[0]) + change)
        differs, relative = np.abs(found) > own, found * 0
        path = entry.site.removesuffix(_WEIGHT).removesuffix(_BIAS)
        for one, other in _gradients(entry, left, right):
            terms, given = (self._places.get((one.step, path + port)) for port in (_TERMS, _INPUT))
            gradients = _values(one, other, left, right)
            if terms is None or gradients is None or (given is None and found.ndim == 2):
                return None
            sizes = np.abs(_wide(left, terms)).reshape(-1, terms.shape[-1])
            inputs = np.ones((len(sizes), 1))
            if found.ndim == 2 and given is not None:
                inputs = np.abs(_wide(left, given)).reshape(-1, given.shape[-1])
            is_alike = found.shape == (sizes.shape[-1], inputs.shape[-1])[: found.ndim] == gradients[0].shape
            if len(sizes) != len(inputs) or not is_alike:
                return None
            off, sums = np.abs(gradients[0] - gradients[1]), (sizes.T @ inputs).reshape(found.shape)
            if (differs & (off > len(sizes) * limits(one.dtype).eps * sums)).any():
                return None
            with np.errstate(all="ignore"):
                relative += np.minimum(np.nan_to_num(off / np.abs(gradients[0])), 2.0)
        return None if (differs & (np.abs(found) > _LARGER * change * relative + own)).any() else found

    def _largest_change(self, site: str) -> float | None:
        """Return the largest step of a parameter, or of the weight beside it; None where no two steps are recorded."""
        steps = []
        for name in (site, site.removesuffix(_BIAS) + _WEIGHT):
            entries = sorted((one for one in self._left.entries if one.site == name), key=lambda one: one.step)
            values = (_wide(self._left, one) for one in entries[:_MOST_STEPS])
            steps += [float(np.abs(b - a).max()) for a, b in itertools.pairwise(values)]
        return max(steps, default=None)

    @functools.cached_property
    def _matches(self) -> Mapping[tuple[int, str], MatchedPair]:
        ends = (_BIAS, _WEIGHT)
        return {(one.baseline.step, one.baseline.site): one for one in self._chosen if one.baseline.site.endswith(ends)}

    @functools.cached_property
    def _places(self) -> Mapping[tuple[int, str], Entry]:
        paths = {site.removesuffix(_BIAS).removesuffix(_WEIGHT) for _, site in self._matches}
        wanted = {path + port for path in paths for port in (_TERMS, _INPUT)}
        return {(one.step, one.site): one for one in self._left.entries if one.site in wanted}


def _wide(side: SourceWrapper, entry: Entry) -> Array:
    return side.values(entry).array.astype(np.float64)


def _values(entry: Entry, other: Entry, left: SourceWrapper, right: SourceWrapper) -> tuple[Array, Array] | None:
    """Return both tensors in float64; None where their shapes differ."""
    left.expect(entry, right, other)
    right.expect(other, left, entry)
    x, y = _wide(left, entry), _wide(right, other)
    return (x, y) if x.shape == y.shape else None


def _beyond(x: Array, y: Array, entry: Entry, other: Entry) -> Array:
    allowed = tolerance(entry.dtype, other.dtype)
    found: Array = np.abs(y - x) > allowed.atol + allowed.rtol * np.abs(x)
    return found


def _gradients(entry: Entry, left: SourceWrapper, right: SourceWrapper) -> Sequence[tuple[Entry, Entry]]:
    """Return the last gradients that an update may be made of, on both sides."""
    site = entry.site.removesuffix(_PARAMETER) + _GRADIENT
    theirs = {one.step: one for one in right.entries if one.site == site}
    ours = [one for one in left.entries if one.site == site and one.step <= entry.step and one.step in theirs]
    return [(one, theirs[one.step]) for one in ours[-_MOST_STEPS:]]
