"""Where the tolerance of a dtype does not fit: tensors below its absolute part, and values of a coarser dtype.

What is relative to the whole tensor counts for small ones: a tolerance leaves that much signal of values around 1, and
so it does of values around 1e-7. Less may still be rounding, where all of the tensor is (the bias of keys has no
gradient): known only beside a tensor of the same module whose own rounding is as large. Else it is not judged.

A file without bfloat16 holds its values as float32, which shows in their bits: what roundings to bfloat16 leave is then
not wrong. What was computed of such values (log-probabilities) does not show it, but the tensors beside it do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from glassengine.blocks.arrays import Values
from glassengine.compare.matching.matching import Match
from glassengine.compare.matching.source_wrapper import SourceWrapper
from glassengine.compare.roundings import is_scaled
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.limits import is_floating
from glassengine.numerics.metrics.tolerance import FEWEST_VALUES, LAST_BITS, Tolerance, tolerance
from glassengine.recording.layout.layout import Entry
from glassengine.results import Figures, Packed

TOO_SMALL = "all of it is below the absolute tolerance: not judged without glass record --noise-floor, or --atol"
SCALED = "it is the baseline's times another factor, though all of it is below the absolute tolerance"
IF_COARSE = "no more than roundings to bfloat16: where a side computes in it, --rtol 1.6e-2"
COARSE = "no more than roundings to the half precision whose values both sides hold"
_SLACK = 10
"""An element of a tensor around 1 may be off by this many times the absolute tolerance, where all are."""
_ALONG = 0.8
_LARGEST_HALF = 65504.0
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


def beside_larger(pairs: Packed, chosen: Sequence[Match], left: SourceWrapper) -> dict[int, str]:
    """Return the places of small tensors that are as small as the rounding of one beside them -> that one.

    Args:
        pairs: All verdicts.
        chosen: What was judged.
        left: The baseline.
    """
    small = [i for i in pairs.flagged() if pairs[i].reason == TOO_SMALL]
    found: dict[int, str] = {}
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
                    found[i] = other.site
    return found


def is_multiple(figures: Figures) -> bool:
    """Whether a candidate is the baseline times a factor: what rounding leaves has no such direction."""
    return is_scaled(figures) and figures.cosine_similarity**2 > _ALONG


def may_be_coarse(figures: Figures, *dtypes: str) -> bool:
    """Whether a difference of tensors of float32 is no more than roundings to bfloat16 leave."""
    coarse = tolerance("bfloat16", "bfloat16")
    is_near = figures.snr_db >= -20 * math.log10(coarse.rtol) and not figures.num_nonfinite_mismatch
    return is_near and set(dtypes) == {"float32"} and not is_multiple(figures)


def precision_of(values: Values) -> str:
    """Return the coarsest dtype that holds all values of a tensor, if they use its last bits; else its own.

    See `numerics.metrics.tolerance.precision_of`, which needs torch.
    """
    array = values.array
    if values.dtype not in ("float32", "float64"):
        return values.dtype
    finite = array[np.isfinite(array)]
    single = finite.astype(np.float32)
    is_coarse = {
        "bfloat16": bool((single == finite).all()) and not (single.view(np.uint32) & 0xFFFF).any(),
        "float16": bool((np.abs(finite) <= _LARGEST_HALF).all()) and bool((single.astype(np.float16) == finite).all()),
    }
    for coarse, bits in LAST_BITS.items():
        if is_coarse[coarse]:
            mantissa = np.frexp(finite)[0] * 2**bits
            return coarse if int((mantissa != mantissa.round()).sum()) >= FEWEST_VALUES else values.dtype
    return values.dtype


def _module(site: str) -> tuple[str, str]:
    path, _, what = site.partition(":")
    return path.rpartition(".")[0], what
