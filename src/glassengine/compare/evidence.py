"""Figures of some rows of a large pair of tensors, and how those of all its rows are merged.

Every figure is a sum, a count, an extreme, or a checksum that those of its parts give. Rows are merged in their order,
so that sums are the same no matter who made the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glassengine.blocks import Difference, merged
from glassengine.numerics.metrics.drift import DriftSums
from glassengine.numerics.metrics.noise_ratio import Means, Slices
from glassengine.writing.checksums import crc32_joined


@dataclass(frozen=True)
class Sums:
    """Sums of squares, as `numerics.metrics.slices` makes means of: over all, and for every index of every axis."""

    error: float
    power: float
    errors: tuple[bytes, ...]
    powers: tuple[bytes, ...]

    @classmethod
    def of(cls, found: Slices) -> Sums:
        """Return the sums as a value."""
        errors, powers = (tuple(x.tobytes() for x in side) for side in (found.errors, found.powers))
        return cls(found.error, found.power, errors, powers)


@dataclass(frozen=True)
class Evidence:
    """What is known of some rows.

    Attributes:
        start: Flat position of the first element.
        difference: Sums over the elements; of rows whose values may hide something None says nothing.
        may_hide: Whether both sides have values by which a mask hides something.
        drift: Sums of the difference of two precisions.
        sums: Of the slices, where there is a noise floor.
        checksums: Of the bytes of both sides, and how many these are.
    """

    start: int
    difference: Difference
    may_hide: bool
    drift: DriftSums | None
    sums: Sums | None
    checksums: tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Whole:
    """The same of all rows; `slices` are means."""

    difference: Difference
    may_hide: bool
    drift: DriftSums | None
    slices: Slices | None
    checksums: tuple[int, int]


def whole_of(parts: Sequence[Evidence], shape: tuple[int, ...]) -> Whole:
    """Return what the rows of a tensor of `shape` together say, each of them in one of `parts`, in their order."""
    drift = None
    if parts[0].drift is not None:
        drift = DriftSums()
        for part in parts:
            assert part.drift is not None
            drift.merge(part.drift)
        drift.num_tensors = min(1, drift.num_tensors)
    return Whole(
        merged([(part.start, part.difference) for part in parts]),
        any(part.may_hide for part in parts),
        drift,
        _slices([part.sums for part in parts if part.sums is not None], shape),
        (crc32_joined([part.checksums[0] for part in parts]), crc32_joined([part.checksums[1] for part in parts])),
    )


def _slices(parts: Sequence[Sums], shape: tuple[int, ...]) -> Slices | None:
    if not parts:
        return None

    def along(which: str) -> tuple[Means, ...]:
        each = [[np.frombuffer(raw) for raw in getattr(part, which)] for part in parts]
        rows = np.concatenate([axes[0] for axes in each])
        others = [np.stack([axes[axis] for axes in each]).sum(0) for axis in range(1, len(shape))]
        return (rows, *others)

    return Slices(
        sum(part.error for part in parts), sum(part.power for part in parts), along("errors"), along("powers")
    ).means(shape)
