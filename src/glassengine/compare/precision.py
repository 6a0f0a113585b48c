"""Two records of two precisions: their difference is drift, not a mistake, and is shown as a table.

A tolerance of one rounding does not apply to a model that rounds after every op, so that nearly all tensors of float32
against bfloat16 are beyond it. The remaining signal is informative: tensors beyond tolerance are suspicious, and
wrong only where more than half of the power is noise, where shapes or whole numbers differ, or numbers overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from glassengine.blocks.arrays import ArrayValues
from glassengine.numerics.drift import LOST, DriftSums, by_growth
from glassengine.numerics.limits import is_floating, sentinel
from glassengine.numerics.tolerance import is_inexact, tolerance
from glassengine.recording.read.source import TensorSource
from glassengine.results import DriftRow, Verdict

_FEWEST = 8
"""Minimum number of elements for that to be meaningful."""


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
    """Return the verdict on a pair that is beyond tolerance: by what is left of the signal.

    Args:
        sums: Of the pair.
        num_elements: That it has.
        is_real: Whether both sides are real floating numbers.
    """
    if not is_real:
        return "wrong"
    return "wrong" if num_elements >= _FEWEST and sums.noise > LOST * sums.signal else "suspicious"


def rows_of_results(rows: Sequence[DriftRow]) -> Sequence[DriftRow]:
    """Return the rows that a budget is for: the results; where none was recorded, the last row."""
    return [row for row in rows if row.kind == "result"] or rows[-1:]
