"""Figures of some rows of a large pair of tensors, and how those of all its rows are merged.

Every figure is a sum, a count, an extreme or a checksum, which the same figures of the parts give. Rows are merged in
their order, so that sums are the same with any number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glassengine.blocks.arithmetic import Difference, merged
from glassengine.compare.loader import Checksums
from glassengine.numerics.metrics.drift import DriftSums
from glassengine.numerics.metrics.noise_ratio import Means, Slices
from glassengine.writing.checksums import crc32_joined


@dataclass(frozen=True)
class RowFigures:
    """The figures of some rows.

    Attributes:
        start: Flat position of the first element.
        difference: Sums over the elements.
        may_hide: Whether both sides have values by which a mask hides something; `difference` is then not meaningful.
        drift: Sums of the difference of two precisions.
        squares: Sums of squares by slices, where there is a noise floor.
        checksums: Of the bytes of both sides.
    """

    start: int
    difference: Difference
    may_hide: bool
    drift: DriftSums | None
    squares: Slices | None
    checksums: Checksums


@dataclass(frozen=True)
class WholeFigures:
    """The figures of all rows of a pair; `slices` are means."""

    difference: Difference
    may_hide: bool
    drift: DriftSums | None
    slices: Slices | None
    checksums: tuple[int, int]


def merged_rows(parts: Sequence[RowFigures], shape: tuple[int, ...]) -> WholeFigures:
    """Return the figures of a tensor of `shape`, each row of which is in one of `parts`, in their order."""
    drift = None
    if parts[0].drift is not None:
        drift = DriftSums()
        for part in parts:
            assert part.drift is not None
            drift.merge(part.drift)
        drift.num_tensors = min(1, drift.num_tensors)
    return WholeFigures(
        merged([(part.start, part.difference) for part in parts]),
        any(part.may_hide for part in parts),
        drift,
        _means([part.squares for part in parts if part.squares is not None], shape),
        (crc32_joined([part.checksums[0] for part in parts]), crc32_joined([part.checksums[1] for part in parts])),
    )


def _means(parts: Sequence[Slices], shape: tuple[int, ...]) -> Slices | None:
    if not parts:
        return None

    def along(sides: Sequence[tuple[Means, ...]]) -> tuple[Means, ...]:
        rows = np.concatenate([axes[0] for axes in sides])
        return (rows, *(np.stack([axes[axis] for axes in sides]).sum(0) for axis in range(1, len(shape))))

    errors, powers = along([part.errors for part in parts]), along([part.powers for part in parts])
    return Slices(sum(part.error for part in parts), sum(part.power for part in parts), errors, powers).means(shape)
