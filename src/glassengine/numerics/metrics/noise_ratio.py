"""The test of `numerics.verdict`, on mean squares slice by slice and a floor that was kept with the recording.

    noise_ratio = max over slices of rms_s(candidate - baseline) / floor_s
    floor_s^2 = max( noise_s^2, noise^2, r^2 mean(B^2), r^2 mean_s(B^2), (u^2 / 3) mean(B^2) )

B is the baseline, r the largest noise of its site in any step, relative to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.limits import is_floating
from glassengine.recording.layout.noise_floor import StoredFloor

Means = np.typing.NDArray[np.float64]


@dataclass(frozen=True)
class Slices:
    """Mean squares, over the whole and for every index of every axis.

    Attributes:
        error: Of candidate - baseline; infinite where an element differs in kind (NaN, infinity, mask, integer).
        power: Of the baseline.
        errors: For each axis float64 [size].
        powers: Likewise.
    """

    error: float
    power: float
    errors: tuple[Means, ...]
    powers: tuple[Means, ...]

    def means(self, shape: Sequence[int]) -> Slices:
        """Return the means of what are sums over a tensor of `shape`."""
        count = max(1, math.prod(shape))
        errors, powers = (
            tuple(sums / max(1, count // max(1, size)) for sums, size in zip(side, shape, strict=True))
            for side in (self.errors, self.powers)
        )
        return Slices(self.error / count, self.power / count, errors, powers)


def noise_ratio(found: Slices, floor: StoredFloor, relative: float, dtype: str) -> float:
    """Return the error over the floor, in the worst slice.

    Args:
        found: The two sides.
        floor: What rounding alone does to the baseline.
        relative: The largest noise of this site in any step, relative to the baseline.
        dtype: torch dtype name of the baseline; the last rounding alone is part of every floor.
    """
    u, tiny = (unit_roundoff(dtype), smallest_precise(dtype)) if is_floating(dtype) else (0.0, 0.0)
    share = max(relative**2, u**2 / 3)
    least = max(floor.whole, found.power * share, tiny**2 / 3)
    ratio: float = _ratio(np.array(found.error), np.array(least))
    for errors, powers, noise in zip(found.errors, found.powers, floor.slices, strict=True):
        ratio = max(ratio, _ratio(errors, np.maximum(np.maximum(noise, powers * share), least)))
    return math.sqrt(ratio)


def _ratio(error: Means, floor: Means) -> float:
    # An infinite floor (rounding alone changes the kind of value) does not judge the candidate.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where((error > 0) & np.isfinite(floor), error / floor, 0.0)
    return float(ratio.max()) if ratio.size else 0.0
