"""Bounds the sum of roundings to a coarse dtype where no noise floor exists: enough to not call it wrong, never ok.

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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from glassengine.blocks.arrays import PIECE_ELEMENTS, Array, ArrayValues
from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.matching.source_wrapper import SourceWrapper
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.limits import is_floating
from glassengine.numerics.slices import Slices
from glassengine.numerics.tolerance import FEWEST_VALUES, LAST_BITS, Tolerance, tolerance
from glassengine.recording.layout.entries import Entries
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.results import Figures, Packed

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
    """Counts what both sides have rounded before a tensor is made.

    Args:
        left: The baseline.
        right: The candidate.
    """

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
        before = {rank: count * _num_steps_before(self._left, step) for rank, count in in_step.items()}
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


def _num_steps_before(side: TensorSource, step: int) -> int:
    return len({entry.step for entry in side.entries if entry.step < step})


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
    """Return the places of small tensors that are as small as the rounding of one beside them -> that one.

    Args:
        pairs: All verdicts.
        chosen: What was judged.
        left: The baseline.
    """
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
