"""What roundings to a coarse dtype add up to, where no noise floor says it: enough not to call it wrong, never ok.

An error of one rounding is at most u of a number, and u / sqrt(3) of a tensor in the root mean square. Of n roundings,
one after another, it is sqrt(n) times that, as each goes its own way. A tolerance for each element does not know the
others: a small one, to which large ones have been added up, has the error of these.

n is the number of tensors of such a dtype that were recorded before. Three training steps of a small GPT on two ranks
of FSDP2 (mixed precision, parameters in bfloat16, AdamW), against one process, are off by at most 0.72 of it in 1552
tensors beyond tolerance. Results that one rank has 5 % too large are off by 2.4 of it where they are made.

It counts only where both sides have rounded to such a dtype before: tolerances of float32 have an absolute part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from glassengine.blocks.arrays import Array
from glassengine.compare.matching.matching import Match
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.limits import is_floating
from glassengine.numerics.metrics.noise_ratio import Slices
from glassengine.numerics.metrics.tolerance import tolerance
from glassengine.recording.layout.entries import Entries
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.results import Figures

ROUNDED = "no more than roundings in half precision add up to: not judged without glass record --noise-floor"
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

    def before(self, match: Match) -> Noise | None:
        """Return what roundings add up to in a tensor of the baseline; None where there are none, or it was given."""
        entry = match.baseline
        if match.rule is not None or entry.site.startswith(_GIVEN) or not is_floating(entry.dtype):
            return None
        if self._of_step is None or self._of_step[0] != entry.step:
            self._of_step = entry.step, self._counted(entry.step)
        return self._of_step[1].get((entry.rank, entry.site))

    def _counted(self, step: int) -> dict[tuple[int, str], Noise]:
        theirs = {entry.site for entry in _of_step(self._right, step) if is_coarse(entry.dtype)}
        own = _of_step(self._left, step)
        coarse = [entry for entry in own if is_coarse(entry.dtype) and entry.site in theirs]
        if not coarse:
            return {}
        dtype = max((entry.dtype for entry in coarse), key=unit_roundoff)
        in_step = {rank: sum(entry.rank == rank for entry in coarse) for rank in {entry.rank for entry in own}}
        before = {rank: count * _num_steps_before(self._left, step) for rank, count in in_step.items()}
        found: dict[tuple[int, str], Noise] = {}
        of_both = {(entry.rank, entry.site) for entry in coarse}
        gradients = {(entry.rank, entry.site): entry for entry in own if entry.site.endswith(_GRADIENT)}
        for entry in own:
            place = entry.rank, entry.site
            before[entry.rank] += place in of_both
            if before[entry.rank]:
                relative = unit_roundoff(dtype) * math.sqrt(before[entry.rank] / 3)
                gradient = gradients.get((entry.rank, entry.site.removesuffix(_PARAMETER) + _GRADIENT))
                found[place] = Noise(relative, dtype, gradient if entry.site.endswith(_PARAMETER) else None)
        return found


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
