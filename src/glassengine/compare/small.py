"""Tensors that are smaller than the absolute part of a tolerance: that it holds of each element says nothing of them.

What is relative to the whole tensor counts there: of one with values around 1 a tolerance leaves that much signal, and so
does it of one with values around 1e-7. Less may still be rounding, where all of the tensor is (the bias of keys has no
gradient): known only beside a tensor of the same module whose own rounding is as large. Else it is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from glassengine.compare.matching.matching import Match
from glassengine.compare.roundings import is_scaled
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.limits import is_floating
from glassengine.numerics.metrics.tolerance import Tolerance
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.results import Figures, Packed

TOO_SMALL = "all of it is below the absolute tolerance: not judged without glass record --noise-floor, or --atol"
SCALED = "it is the baseline's times another factor, though all of it is below the absolute tolerance"
_SLACK = 10
"""An element of a tensor around 1 may be off by this many times the absolute tolerance, where all are."""
_ALONG = 0.8
_MOST_ROUNDINGS = 64
"""Units of rounding of a tensor that may be left of a sum of its elements."""


def is_small(figures: Figures, allowed: Tolerance, dtype: str) -> bool:
    """Whether nothing but the absolute part of a tolerance makes rounding of a difference.

    Numbers that a dtype stores with fewer digits than others differ by as much, and some processors flush them to zero.
    """
    if not is_floating(dtype) or figures.max_abs_diff <= smallest_precise(dtype):
        return False
    least = -20 * math.log10(allowed.rtol + _SLACK * allowed.atol) if allowed.rtol + allowed.atol else -math.inf
    return figures.allclose and figures.num_different > 0 and figures.snr_db < least


def beside_larger(pairs: Packed, chosen: Sequence[Match], left: TensorSource) -> dict[int, str]:
    """Return the places of small tensors that are as small as the rounding of one beside them -> that one.

    Args:
        pairs: All verdicts.
        chosen: What was judged.
        left: The baseline.
    """
    small = [i for i in pairs.flagged() if pairs[i].reason == TOO_SMALL]
    found: dict[int, str] = {}
    by_module: dict[tuple[int, int, str], list[Entry]] = {}
    for entry in left.entries if small else ():
        by_module.setdefault((entry.step, entry.rank, _module(entry.site)), []).append(entry)
    for i in small:
        own, figures = chosen[i].baseline, pairs[i].figures
        beside = by_module[own.step, own.rank, _module(own.site)] if "." in own.site else []
        for other in beside:
            if other.site != own.site and is_floating(other.dtype) and figures is not None and math.prod(other.shape):
                size = float(left.tensor(other).abs().max())
                if figures.max_abs_diff <= _MOST_ROUNDINGS * unit_roundoff(other.dtype) * size:
                    found[i] = other.site
    return found


def is_multiple(figures: Figures) -> bool:
    """Whether a candidate is the baseline times a factor: what rounding leaves has no such direction."""
    return is_scaled(figures) and figures.cosine_similarity**2 > _ALONG


def _module(site: str) -> str:
    return site.rpartition(".")[0]
