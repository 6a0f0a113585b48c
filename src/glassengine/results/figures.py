"""One tensor, and the difference of two: statistics, figures, and distances in finer detail."""

from __future__ import annotations

from dataclasses import dataclass

from glassengine.results.base import Result


@dataclass(frozen=True)
class UlpDistance(Result):
    """How many representable values lie between candidate and baseline, over elements finite on both sides.

    -0 and +0 are the same value.

    Attributes:
        num_finite: Elements that were counted.
        num_nonfinite_mismatch: Elements that are not, and differ.
        max_ulp: Largest distance; None when nothing was counted.
        worst_index: The first element that far away; None when all agree.
        histogram: The first number counts the distance 0, number k distances from 2 ** (k - 1) to below 2 ** k.
    """

    num_finite: int
    num_nonfinite_mismatch: int
    max_ulp: int | None
    worst_index: tuple[int, ...] | None
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class SliceMaxima(Result):
    """The largest |c - b| within every slice of one axis.

    Attributes:
        axis: Which one.
        size: Its length.
        step: How many indices a slice has: 1, but for long axes.
        maxima: Number i is of the indices from i * step; a mismatch of non-finite values counts as infinite.
    """

    axis: int
    size: int
    step: int
    maxima: tuple[float, ...]

    @property
    def worst_index(self) -> int | None:
        """The first index along the axis (of the first `step` many) with the largest error; None where none differs."""
        largest = max(self.maxima, default=0.0)
        return self.maxima.index(largest) * self.step if largest > 0 else None


@dataclass(frozen=True)
class ElementDifference(Result):
    """One element of two tensors.

    Attributes:
        index: Where.
        baseline: Its value there, true as 1.
        candidate: Likewise.
    """

    index: tuple[int, ...]
    baseline: float
    candidate: float


@dataclass(frozen=True)
class TensorValues(Result):
    """What single elements of two tensors say, that figures of all of them do not.

    Attributes:
        worst: Those that differ most, at most 12, a mismatch of NaN or infinity first.
        ulp: Distances in representable values; None where the dtypes differ or have no such.
        axes: The largest error of every index along every axis, in at most 256 pieces.
    """

    worst: tuple[ElementDifference, ...]
    ulp: UlpDistance | None
    axes: tuple[SliceMaxima, ...]


@dataclass(frozen=True)
class Summary(Result):
    """Statistics of one tensor.

    Attributes:
        shape: Sizes.
        dtype: torch dtype name.
        num_elements: How many there are, all of them.
        min: Least finite element; None where none is finite.
        mean: Of the finite elements.
        median: Of the finite elements.
        max: Largest finite element.
        std: Standard deviation of the finite elements.
        num_nan: How many are NaN.
        num_inf: How many are infinite, of either sign.
    """

    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    min: float | None
    mean: float | None
    median: float | None
    max: float | None
    std: float | None
    num_nan: int
    num_inf: int


@dataclass(frozen=True)
class Figures(Result):
    """Difference of a candidate tensor to its baseline; all errors are candidate - baseline, in float64.

    Elements that are NaN on both sides, or the same infinity on both, agree.

    Attributes:
        num_elements: How many were compared.
        num_different: How many are not equal.
        max_abs_diff: Largest |c - b|.
        mean_abs_diff: Mean |c - b|.
        rms_diff: Root mean square of c - b.
        max_rel_diff: Largest |c - b| / |b|, over elements with b != 0.
        mean_rel_diff: Mean of the same.
        cosine_similarity: Of the two tensors as vectors.
        snr_db: Signal-to-noise ratio: power of the baseline over that of the error, in dB.
        worst_index: Where |c - b| is largest.
        baseline_at_worst: The baseline's value there.
        candidate_at_worst: The candidate's value there.
        num_nonfinite_mismatch: Elements that are finite on one side only, or differ in the kind of non-finite value.
        num_beyond_tolerance: Elements with |c - b| > atol + rtol |b|.
        rtol: Relative tolerance of that count.
        atol: Absolute tolerance of that count.
    """

    num_elements: int
    num_different: int
    max_abs_diff: float
    mean_abs_diff: float
    rms_diff: float
    max_rel_diff: float
    mean_rel_diff: float
    cosine_similarity: float
    snr_db: float
    worst_index: tuple[int, ...] | None
    baseline_at_worst: float | None
    candidate_at_worst: float | None
    num_nonfinite_mismatch: int
    num_beyond_tolerance: int
    rtol: float
    atol: float

    @property
    def allclose(self) -> bool:
        """Whether every element satisfies |c - b| <= atol + rtol * |b|."""
        return self.num_beyond_tolerance == 0
