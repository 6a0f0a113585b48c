"""Judges rounding where no noise floor exists: of coarse dtypes, of two precisions, in updates of an optimizer.

Sums of roundings to a coarse dtype have a bound, which is enough to not call a difference wrong, and never ok.

An error of one rounding is at most u of a number, and u / sqrt(3) of a tensor in the root mean square. Of n roundings,
one after another, it is sqrt(n) times that, as each goes its own way. A tolerance for each element does not know the
others: a small one, to which large ones have been added up, has the error of these.

n is the number of tensors of such a dtype that were recorded before. Three training steps of a small GPT on two ranks
of FSDP2 (mixed precision, parameters in bfloat16, AdamW), against one process, are off by at most 0.72 of it in 1552
tensors beyond tolerance. Results that one rank has 5 % too large are off by 2.4 of it where they are made.

It counts only where both sides have rounded to such a dtype before: tolerances of float32 have an absolute part.

What is relative to the whole tensor counts for small ones: a tolerance leaves that much signal of values around 1, and
so it does of values around 1e-7. Less may still be rounding, where all of the tensor is (the bias of keys has no
gradient): known only beside a tensor of the same module whose own rounding is as large. Else it is not judged.

A file without bfloat16 holds its values as float32, which shows in their bits: what roundings to bfloat16 leave is then
not wrong. What was computed of such values (log-probabilities) does not show it, but the tensors beside it do.

Of two records of two precisions, the difference is drift, and is shown as a table. A tolerance of one rounding does not
apply to a model that rounds after every op: tensors beyond it are suspicious, and wrong only where more than half of
the power is noise, where shapes or whole numbers differ, or numbers overflow.

An optimizer that divides a gradient by its size makes a whole step of any. The bias of keys, and a bias ahead of a
norm, have no gradient: what is computed is rounding, which differs from run to run, and so does the update of Adam. Two
records without a noise floor cannot say that this is right; they can say that it is all that differs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from glassengine.blocks.arrays import PIECE_ELEMENTS, Array, ArrayValues
from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.matching.sources import SourceWrapper
from glassengine.numerics.drift import LOST, DriftSums, by_growth
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.limits import is_floating, limits, sentinel
from glassengine.numerics.slices import Slices
from glassengine.numerics.tolerance import FEWEST_VALUES, LAST_BITS, Tolerance, is_inexact, tolerance
from glassengine.recording.layout.entries import Entries
from glassengine.recording.layout.layout import Entry
from glassengine.recording.source import TensorSource
from glassengine.results import DriftRow, Figures, Hint, Packed, Verdict

BY_TOLERANCE = "tolerance (uncalibrated)"
ROUNDED = "within what rounding in half precision adds up to: not judged without glass record --noise-floor"
"""The reason of what is neither ok nor wrong."""

_PARAMETER, _GRADIENT = ":param", ":grad"
_MOST = 2.0
_GIVEN = ".:in"
_ALONG = 0.8
"""Share of the power of an error from which on it has a direction: roundings have none."""
_FEWEST = 16
"""Elements that a direction takes."""


class Noise(NamedTuple):
    """What is expected of a tensor, relative to it.

    Attributes:
        relative: Root mean square.
        dtype: Of the roundings, the coarsest.
        gradient: Of a parameter, the one that its last update was made of.
    """

    relative: float
    dtype: str
    gradient: Entry | None = None


class Roundings:
    """Counts what both sides have rounded before a tensor is made."""

    def __init__(self, left: TensorSource, right: TensorSource) -> None:
        self._left, self._right = left, right
        self._of_step: tuple[int, dict[tuple[int, str], Noise]] | None = None

    def before(self, match: MatchedPair) -> Noise | None:
        """Return what roundings add up to in a tensor of the baseline; None where there are none, or it was given."""
        entry = match.baseline
        if match.rule is not None or entry.site.startswith(_GIVEN) or not is_floating(entry.dtype):
            return None
        found = self._of_step  # another thread may be at another step
        if found is None or found[0] != entry.step:
            self._of_step = found = entry.step, self._counted(entry.step)
        return found[1].get((entry.rank, entry.site))

    def _counted(self, step: int) -> dict[tuple[int, str], Noise]:
        theirs = {entry.site for entry in _of_step(self._right, step) if is_coarse(entry.dtype)}
        own = _of_step(self._left, step)
        coarse = [entry for entry in own if is_coarse(entry.dtype) and entry.site in theirs]
        if not coarse:
            return {}
        dtype = max((entry.dtype for entry in coarse), key=unit_roundoff)
        in_step = {rank: sum(entry.rank == rank for entry in coarse) for rank in {entry.rank for entry in own}}
        num_steps = len({entry.step for entry in self._left.entries if entry.step < step})
        before = {rank: count * num_steps for rank, count in in_step.items()}
        noises: dict[tuple[int, str], Noise] = {}
        of_both = {(entry.rank, entry.site) for entry in coarse}
        gradients = {(entry.rank, entry.site): entry for entry in own if entry.site.endswith(_GRADIENT)}
        for entry in own:
            place = entry.rank, entry.site
            before[entry.rank] += place in of_both
            if before[entry.rank]:
                relative = unit_roundoff(dtype) * math.sqrt(before[entry.rank] / 3)
                gradient = gradients.get((entry.rank, entry.site.removesuffix(_PARAMETER) + _GRADIENT))
                noises[place] = Noise(relative, dtype, gradient if entry.site.endswith(_PARAMETER) else None)
        return noises


def is_coarse(dtype: str) -> bool:
    """Return whether the tolerance of a dtype is no help where elements are small: its absolute part is below u."""
    return is_floating(dtype) and tolerance(dtype, dtype).atol < unit_roundoff(dtype)


def may_be_rounding(figures: Figures, found: Slices, noise: Noise) -> bool:
    """Return whether an error is no more than roundings add up to, in any slice, and has no direction."""
    if figures.num_nonfinite_mismatch or not math.isfinite(found.error) or is_scaled(figures):
        return False
    share = (_MOST * noise.relative) ** 2
    least = max(found.power * share, smallest_precise(noise.dtype) ** 2)
    if found.error > least:
        return False
    for errors, powers in zip(found.errors, found.powers, strict=True):
        # Of the squares of k normal numbers, added up in each of m slices, the largest sum.
        k, x = figures.num_elements / len(errors), math.log(len(errors))
        allowed = np.maximum(powers * share, least) * (1 + 2 * math.sqrt(x / k) + 2 * x / k)
        if bool((errors > allowed).any()):
            return False
    return True


def is_along(difference: Array, other: Array) -> bool:
    """Return whether a difference is a multiple of another tensor, but for a small rest; both float64, of one shape."""
    powers = float(np.square(difference).sum() * np.square(other).sum())
    return difference.size >= _FEWEST and float((difference * other).sum()) ** 2 > _ALONG * powers


def is_scaled(figures: Figures) -> bool:
    """Return whether the candidate is a multiple of the baseline, but for a small rest: the same, by figures alone."""
    loss, cosine = 10 ** (-figures.snr_db / 10), figures.cosine_similarity
    return figures.num_elements >= _FEWEST and loss > 0 and 1 - (1 - cosine**2) / loss > _ALONG


def _of_step(side: TensorSource, step: int) -> Sequence[Entry]:
    entries = side.entries
    return entries.of_step(step) if isinstance(entries, Entries) else [one for one in entries if one.step == step]


TOO_SMALL = "all of it is below the absolute tolerance: not judged without glass record --noise-floor, or --atol"
SCALED = "it is the baseline's times another factor, though all of it is below the absolute tolerance"
IF_COARSE = "within rounding to bfloat16: if a side computes in it, give --rtol 1.6e-2"
COARSE = "within rounding to the half precision whose values both sides hold"
SLACK = 10
"""An element of a tensor around 1 may be off by this many times the absolute tolerance, where all are."""
_LARGEST_HALF = 65504.0
_MOST_ROUNDINGS = 64
"""Units of rounding of a tensor that may be left of a sum of its elements."""


def is_small(figures: Figures, allowed: Tolerance, dtype: str) -> bool:
    """Whether nothing but the absolute part of a tolerance makes rounding of a difference.

    Numbers that a dtype stores with fewer digits than others differ by as much, and some processors flush them to zero.
    """
    if not is_floating(dtype) or figures.max_abs_diff <= smallest_precise(dtype):
        return False
    least = -20 * math.log10(allowed.rtol + SLACK * allowed.atol) if allowed.rtol + allowed.atol else -math.inf
    return figures.allclose and figures.num_different > 0 and figures.snr_db < least


def beside_larger(pairs: Packed, chosen: Sequence[MatchedPair], left: SourceWrapper) -> dict[int, str]:
    """Return the places of small tensors that are as small as the rounding of one beside them -> that one."""
    small = [i for i in pairs.flagged() if pairs[i].reason == TOO_SMALL]
    larger: dict[int, str] = {}
    by_module: dict[tuple[int, int, tuple[str, str]], list[Entry]] = {}
    for entry in left.entries if small else ():
        by_module.setdefault((entry.step, entry.rank, _module(entry.site)), []).append(entry)
    for i in small:
        own, figures = chosen[i].baseline, pairs[i].figures
        beside = by_module[own.step, own.rank, _module(own.site)] if "." in own.site else []
        for other in beside:
            if other.site != own.site and is_floating(other.dtype) and figures is not None and 0 not in other.shape:
                size = float(np.abs(left.values(other).array).max())
                if figures.max_abs_diff <= _MOST_ROUNDINGS * unit_roundoff(other.dtype) * size:
                    larger[i] = other.site
    return larger


def is_multiple(figures: Figures) -> bool:
    """Whether a candidate is the baseline times a factor: what rounding leaves has no such direction."""
    return is_scaled(figures) and figures.cosine_similarity**2 > _ALONG


def may_be_coarse(figures: Figures, *dtypes: str) -> bool:
    """Whether a difference of tensors of float32 is no more than roundings to bfloat16 leave."""
    coarse = tolerance("bfloat16", "bfloat16")
    is_near = figures.snr_db >= -20 * math.log10(coarse.rtol) and not figures.num_nonfinite_mismatch
    return is_near and set(dtypes) == {"float32"} and not is_multiple(figures)


def precision_of(values: ArrayValues) -> str:
    """Return the coarsest dtype that holds all values of a tensor, if they use its last bits; else its own.

    See `numerics.tolerance.precision_of`, which needs torch.
    """
    if values.dtype not in ("float32", "float64"):
        return values.dtype
    flat = values.array.reshape(-1)
    pieces = [flat[start : start + PIECE_ELEMENTS] for start in range(0, len(flat), PIECE_ELEMENTS)]
    held = list(LAST_BITS)
    for piece in pieces:
        if not (held := [coarse for coarse in held if _holds(coarse, piece[np.isfinite(piece)])]):
            return values.dtype
    num_fine = 0
    for piece in pieces:
        mantissa = np.frexp(piece[np.isfinite(piece)])[0] * 2 ** LAST_BITS[held[0]]
        if (num_fine := num_fine + int((mantissa != mantissa.round()).sum())) >= FEWEST_VALUES:
            return held[0]
    return values.dtype


def _holds(coarse: str, finite: Array) -> bool:
    single = finite.astype(np.float32)
    if coarse == "bfloat16":
        return bool((single == finite).all()) and not (single.view(np.uint32) & 0xFFFF).any()
    return bool((np.abs(finite) <= _LARGEST_HALF).all()) and bool((single.astype(np.float16) == finite).all())


def _module(site: str) -> tuple[str, str]:
    path, _, what = site.partition(":")
    return path.rpartition(".")[0], what


_FEWEST_OF_SIGNAL = 8
"""Elements that a share of the signal takes to be meaningful."""


def two_precisions(left: TensorSource, right: TensorSource) -> tuple[str, str] | None:
    """Return the dtypes of the models that two records are of, where these differ in precision."""
    ours, theirs = (str(side.metadata.get("dtype")) for side in (left, right))
    if not (is_inexact(ours) and is_inexact(theirs)):
        return None
    return (ours, theirs) if tolerance(ours, ours).rtol != tolerance(theirs, theirs).rtol else None


def drift_of(x: ArrayValues, y: ArrayValues) -> DriftSums:
    """Return the sums of one pair: of the elements that are numbers on both sides; none of other kinds of tensors."""
    sums = DriftSums()
    if not (is_floating(x.dtype) and is_floating(y.dtype)) or x.array.shape != y.array.shape or not x.array.size:
        return sums
    # A number that hides a place of a mask has a size of its own in every dtype.
    limit = sentinel(x.dtype, y.dtype)
    b, c = x.array.astype(np.float64).reshape(-1), y.array.astype(np.float64).reshape(-1)
    counted = (np.abs(b) < limit) & (np.abs(c) < limit)
    if not counted.all():
        b, c = np.where(counted, b, 0.0), np.where(counted, c, 0.0)
    # Not by BLAS, whose sums depend on the number of its threads.
    sums.num_tensors, sums.signal, sums.power = 1, float(np.square(b).sum()), float(np.square(c).sum())
    sums.dot, sums.noise = float((b * c).sum()), float(np.square(c - b).sum())
    return sums


@dataclass
class PrecisionTable:
    """The table of two records, gathered in the order of their tensors.

    Attributes:
        dtypes: Of both sides.
        found: Site of the baseline -> that of the candidate, and the sums, in the order in which they were made.
    """

    dtypes: tuple[str, str]
    found: dict[str, tuple[str, DriftSums]] = field(default_factory=dict)

    def add(self, site: str, candidate_site: str, sums: DriftSums) -> None:
        """Add a pair; in which order pairs are added decides the order of the rows."""
        _, known = self.found.setdefault(site, (candidate_site, DriftSums()))
        known.merge(sums)

    def table(self) -> tuple[DriftRow, ...]:
        """Return the rows: outputs of modules and ops, results last."""
        rows = []
        for site, (other, sums) in self.found.items():
            path, _, port = site.partition(":")
            if not sums.num_tensors or (port and not port.startswith("out")):
                continue
            is_result = path in ("", ".", "logits")
            rows.append(sums.row(site, other, "result" if is_result else "module"))
        inner = [row for row in rows if row.kind != "result"]
        return (*by_growth(inner), *(row for row in rows if row.kind == "result"))


def by_drift(sums: DriftSums, *, num_elements: int, is_real: bool) -> Verdict:
    """Return the verdict on a pair that is beyond tolerance: by what is left of the signal."""
    if not is_real:
        return "wrong"
    return "wrong" if num_elements >= _FEWEST_OF_SIGNAL and sums.noise > LOST * sums.signal else "suspicious"


_INPUT = ":in[0]"
_BIAS, _WEIGHT, _TERMS = ".bias:param", ".weight:param", ":grad_out"
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
    """Return that a parameter differs where its gradients are rounding, and nowhere else."""
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
    """Differences of parameters, each proven to be made of rounding."""

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
