"""The sums of `totals`, for pieces of real numbers in the CPU's memory, at one precision and without allocations.

numpy alone, so that a comparison of recordings needs no torch; for large tensors numba where it is installed. float8
and bfloat16, which numpy does not have, come as the float32 numbers that they are.

float32 is used where it holds every element of both sides, float64 else. What float32 does is as good:

- A difference is rounded once, relative error u = 2**-24. Products and absolute values are added up over rows of 256 in
  float32, where a vector unit of 32 partial sums or more rounds each at most 8 times and their sum 5 times, and over
  rows in float64: relative error of a sum of positive terms at most 15 u = 9e-7, and typically a hundredth of that.
- `c . c` and `b . c` follow from `b . b`, `b . d` and `d . d` unless d is large: fewer products, and no cancellation
  in a cosine near 1.
- Rounding is monotonic: the largest difference is among those whose float32 value is largest, and those few are
  looked at in float64. Elements too close to the tolerance for float32 to tell are decided in float64.
- A piece with anything that is not finite, or whose squares leave the range of float32, or with an integer that
  float64 does not hold, is declined with nothing added; the next one in line takes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

ROW = 256

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)

# Fills up the last row: not 0, so that 0 / |b| stays 0, but small enough for its square to be 0.
_PADDING = {FLOAT32: 2.0**-80, FLOAT64: 2.0**-540}

# Sums of squares below this could have lost summands to underflow, also where subnormal numbers are flushed to zero.
_SMALLEST_SQUARES = 1e-26

# Twice the distance at which rounding can move an element across the tolerance, relative to the largest difference.
_MARGIN = 16 * 2.0**-24

_LARGEST_INTEGER = 1 << 53
"""Up to here float64 holds every integer; a piece with a larger one is declined."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class RawDifference:
    """Raw sums of candidate - baseline; sums and counts are over elements that are finite on both sides.

    `num_mismatched` counts elements that are not finite and do not agree (NaN agrees with NaN, an infinity with the
    same infinity); they are also in `num_different` and `num_beyond`. `worst` is the flat row-major position of the
    first mismatched element or else of the largest `|c - b|`, and None when nothing differs.
    """

    num_elements: int
    num_finite: int
    num_different: int
    num_mismatched: int
    num_beyond: int
    sum_abs: float
    sum_squares: float
    max_abs: float
    num_nonzero: int
    sum_rel: float
    max_rel: float
    dot: float
    baseline_squares: float
    candidate_squares: float
    worst: int | None
    baseline_at_worst: float | None
    candidate_at_worst: float | None


class DifferenceSums:
    """The running sums behind `difference`; the attributes are the fields of `RawDifference` but `num_elements`."""

    def __init__(self) -> None:
        self.num_finite = self.num_different = self.num_mismatched = self.num_beyond = self.num_nonzero = 0
        self.sum_abs = self.sum_squares = self.max_abs = self.sum_rel = self.max_rel = 0.0
        self.dot = self.baseline_squares = self.candidate_squares = 0.0
        self.worst: int | None = None
        self.baseline_at_worst: float | None = None
        self.candidate_at_worst: float | None = None

    def merge(self, part: DifferenceSums) -> None:
        """Add the sums of a later piece; its places are of the whole tensor."""
        is_first = bool(part.num_mismatched) and not self.num_mismatched
        if is_first or (part.max_abs > self.max_abs and not self.num_mismatched):
            self.worst, self.baseline_at_worst = part.worst, part.baseline_at_worst
            self.candidate_at_worst = part.candidate_at_worst
        self.num_finite += part.num_finite
        self.num_different += part.num_different
        self.num_mismatched += part.num_mismatched
        self.num_beyond += part.num_beyond
        self.num_nonzero += part.num_nonzero
        self.sum_abs += part.sum_abs
        self.sum_squares += part.sum_squares
        self.sum_rel += part.sum_rel
        self.dot += part.dot
        self.baseline_squares += part.baseline_squares
        self.candidate_squares += part.candidate_squares
        self.max_abs = max(self.max_abs, part.max_abs)
        self.max_rel = max(self.max_rel, part.max_rel)

    def add_mismatched(self, count: int, first: int, baseline: float, candidate: float) -> None:
        """Add elements that are not finite and do not agree; the first is at `first` and has these values."""
        if not self.num_mismatched:
            self.worst, self.baseline_at_worst, self.candidate_at_worst = first, baseline, candidate
        self.num_mismatched += count
        self.num_different += count
        self.num_beyond += count


def merged(parts: Sequence[tuple[int, RawDifference]]) -> RawDifference:
    """Return the sums of consecutive parts of one tensor, each with the flat position of its first element."""
    total = DifferenceSums()
    for start, part in parts:
        sums = DifferenceSums()
        vars(sums).update((name, value) for name, value in vars(part).items() if name != "num_elements")
        sums.worst = None if part.worst is None else start + part.worst
        total.merge(sums)
    return RawDifference(sum(part.num_elements for _, part in parts), **vars(total))


class Sums(NamedTuple):
    """What one pass over a piece finds; d is the candidate less the baseline.

    Attributes:
        num_different: Elements.
        num_zero: Elements of the baseline.
        baseline_squares: b . b
        dot: b . d
        squares: d . d
        sum_abs: Of |d|.
        sum_rel: Of |d| / |b| where b is not 0.
        largest: |d|.
        largest_rel: |d| / |b| where b is not 0.
        num_beyond: Elements with |d| above the tolerance; None where float32 cannot tell, or it is not counted yet.
        is_exact: Each d is known to be exact.
    """

    num_different: int
    num_zero: int
    baseline_squares: float
    dot: float = 0.0
    squares: float = 0.0
    sum_abs: float = 0.0
    sum_rel: float = 0.0
    largest: float = 0.0
    largest_rel: float = 0.0
    num_beyond: int | None = None
    is_exact: bool = False


BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
"""The bits of bfloat16, as arrays hold them that are not widened yet."""


class Arithmetic:
    """Scratch space for one pair of pieces at a time, and what is done in it; the largest piece has `size` elements."""

    pieces = 1
    """Of the plain path that are added up together."""
    bfloat16: np.dtype[Any] | None = None
    """How bits of bfloat16 may come."""

    def __init__(self, dtype: np.dtype[Any], size: int, rtol: float, atol: float) -> None:
        self._dtype = dtype
        self._is_wide = dtype == FLOAT64
        self.capacity = -(-size // ROW) * ROW
        self._rtol = rtol
        self._atol = atol
        self._length = 0

    def partial(self, start: int, b: Array, c: Array, *, above: float) -> DifferenceSums | None:
        """Return the sums of one pair of flat pieces that begins at flat position `start`, or None.

        Args:
            start: Flat position.
            b: Of the baseline.
            c: Of the candidate.
            above: The largest difference of the earlier pieces; smaller ones have no position.
        """
        if not (_is_held(b) and _is_held(c)):
            return None
        if self._length != (length := -(-len(b) // ROW) * ROW):
            self._cut(length)
        x, y = self._load(b, self._x), self._load(c, self._y)
        part = self._finite(start, len(b), x, y, above)
        if part is None:
            part = self._rest(start, len(b), self._values(x, self._x), self._values(y, self._y), above)
        return part

    def _finite(self, start: int, num_elements: int, x: Array, y: Array, above: float) -> DifferenceSums | None:
        """Return the sums if x, y and all that is computed from them are finite and nothing is lost to underflow."""
        found = self._pass_over(x, y)
        if found is None:
            return None
        part = DifferenceSums()
        part.num_finite, part.num_nonzero = num_elements, num_elements - found.num_zero
        b_squares, d_squares = found.baseline_squares, found.squares
        if not found.num_different:
            if not part.num_nonzero:
                return part
            if not (math.isfinite(b_squares) and (self._is_wide or b_squares >= _SMALLEST_SQUARES)):
                return None
            part.dot = part.baseline_squares = part.candidate_squares = b_squares
            return part
        if not 0 < found.largest < math.inf:
            return None
        if d_squares > b_squares / 4:
            wide_x, wide_y = self._values(x, self._x), self._values(y, self._y)
            c_squares, b_dot_c = (_total(self._rows(z), self._rows(wide_y)) for z in (wide_y, wide_x))
        else:
            c_squares, b_dot_c = b_squares + 2 * found.dot + d_squares, b_squares + found.dot
        if not math.isfinite(b_squares + c_squares + b_dot_c + d_squares + found.sum_abs + found.sum_rel) or not (
            self._is_wide or min(b_squares, c_squares, d_squares) >= _SMALLEST_SQUARES
        ):
            return None
        part.num_different, part.sum_abs, part.sum_squares = found.num_different, found.sum_abs, d_squares
        part.sum_rel, part.max_rel = found.sum_rel, found.largest_rel
        part.dot, part.baseline_squares, part.candidate_squares = b_dot_c, b_squares, c_squares
        # Of differences that were rounded, one that looks as large as the largest can be larger.
        if found.largest > above if found.is_exact else found.largest >= self._dtype.type(above):
            self._note_largest(part, start, self._values(x, self._x), self._values(y, self._y), found.largest)
        if found.num_zero or found.largest_rel * (1 + _MARGIN) > self._rtol:
            part.num_beyond = self._num_beyond(x, y, found)
        return part

    def _pass_over(self, x: Array, y: Array) -> Sums | None:
        """Return what one pass finds, or None where an element is not finite."""
        d, size, ratio = self._d, self._size, self._ratio
        num_different = _count(np.not_equal(x, y, out=self._mask))
        x_rows, d_rows = self._rows(x), self._d_rows
        if not num_different:
            return Sums(
                0, _count(np.equal(x, 0, out=self._mask)), _total(x_rows, x_rows), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, True
            )
        np.subtract(y, x, out=d)
        np.vecdot(x_rows, x_rows, out=self._sums[0])
        np.vecdot(x_rows, d_rows, out=self._sums[1])
        np.vecdot(d_rows, d_rows, out=self._sums[2])
        np.absolute(d, out=d)
        np.vecdot(d_rows, self._ones, out=self._sums[3])
        largest = float(d[d.argmax()])
        if not 0 < largest < math.inf:
            return None
        np.divide(d, np.absolute(x, out=size), out=ratio)
        np.vecdot(self._ratio_rows, self._ones, out=self._sums[4])
        b_squares, b_dot_d, d_squares, sum_abs, sum_rel = self._partial.sum(axis=1, dtype=np.float64).tolist()
        num_zero = 0
        if not math.isfinite(sum_rel):
            num_zero = _count(np.equal(size, 0, out=self._mask))
            if _count(np.isfinite(ratio, out=self._mask)) + num_zero != ratio.size:
                return None
            np.nan_to_num(ratio, copy=False, posinf=0.0, neginf=0.0)
            sum_rel = _total(self._ratio_rows, self._ones)
        largest_rel = float(ratio[ratio.argmax()])
        return Sums(num_different, num_zero, b_squares, b_dot_d, d_squares, sum_abs, sum_rel, largest, largest_rel)

    def _rest(self, start: int, num_elements: int, x: Array, y: Array, above: float) -> DifferenceSums | None:
        """Return the sums of x and y, some elements of which are not finite, or None if all are."""
        both = np.isfinite(x) & np.isfinite(y)
        num_dropped = both.size - _count(both)
        if not num_dropped:
            return None
        mismatched = ~(both | (x == y) | (np.isnan(x) & np.isnan(y)))
        count = _count(mismatched)
        first = int(mismatched.argmax())
        values = float(x[first]), float(y[first])
        # Where a side is not finite both become 0: equal, and no part of any sum.
        for array, cleaned in ((x, self._x), (y, self._y)):
            np.copyto(cleaned, array)
            np.nan_to_num(cleaned, copy=False, posinf=0.0, neginf=0.0)
            np.multiply(cleaned, both, out=cleaned)
        part = self._finite(start, num_elements, self._x, self._y, above)
        if part is None:
            return None
        part.num_finite -= num_dropped
        if count:
            part.add_mismatched(count, start + first, *values)
        return part

    def _note_largest(self, part: DifferenceSums, start: int, x: Array, y: Array, largest: float) -> None:
        """Note the first of the largest differences."""
        places = self._places_of(largest, x, y)
        first = places[0]
        # Of what was subtracted in float64 the first of the largest is the largest.
        if len(places) > 1 and not self._is_wide:
            first = places[int(np.abs(y[places].astype(np.float64) - x[places].astype(np.float64)).argmax())]
        b, c = float(x[first]), float(y[first])
        part.max_abs, part.worst = abs(c - b), start + int(first)
        part.baseline_at_worst, part.candidate_at_worst = b, c

    def _places_of(self, largest: float, x: Array, y: Array) -> Array:
        """Return where |y - x| in this precision is `largest`."""
        return np.flatnonzero(np.equal(self._d, largest, out=self._mask))

    def _num_beyond(self, x: Array, y: Array, found: Sums) -> int:
        """Count |d| > atol + rtol * |b| as float64 does."""
        rtol, atol = self._rtol, self._atol
        margin = 0.0 if self._is_wide else _MARGIN * found.largest
        if found.largest + margin <= atol:
            return 0
        np.multiply(self._size, rtol, out=self._ratio)
        if self._is_wide:
            np.add(self._ratio, atol, out=self._ratio)
            return _count(np.greater(self._d, self._ratio, out=self._mask))
        # An element near the tolerance has rtol * |b| <= |d| <= largest, and so is off by less than the margin; one
        # far inside may be off by more, and stays inside.
        np.subtract(self._d, self._ratio, out=self._ratio)
        maybe = _count(np.greater(self._ratio, atol - margin, out=self._mask))
        if maybe == 0 or _count(np.greater(self._ratio, atol + margin, out=self._mask)) == maybe:
            return maybe
        return self._num_beyond_in_float64(x, y)

    def _num_beyond_in_float64(self, x: Array, y: Array) -> int:
        b, c = x.astype(np.float64), y.astype(np.float64)
        return _count(np.abs(c - b) > np.abs(b) * self._rtol + self._atol)

    def _values(self, piece: Array, scratch: Array) -> Array:
        """Return the numbers of what `_load` returned."""
        return piece

    def _cut(self, length: int) -> None:
        """Make the scratch arrays `length` long, a multiple of the row."""
        if not self._length:
            self._scratch = np.empty((5, self.capacity), dtype=self._dtype)
            self._ones = np.ones(ROW, dtype=self._dtype)
        self._length = length
        self._x, self._y, self._d, self._size, self._ratio = self._scratch[:, :length]
        self._d_rows, self._ratio_rows = self._rows(self._d), self._rows(self._ratio)
        self._mask = np.empty(length, dtype=bool)
        self._partial = np.empty((5, length // ROW), dtype=self._dtype)
        self._sums = tuple(self._partial)

    def _load(self, piece: Array, scratch: Array) -> Array:
        """Return `piece` in this precision: itself if it can be, else as `scratch`, filled up to whole rows."""
        num_elements = len(piece)
        if num_elements == self._length and piece.dtype == self._dtype:
            return piece
        scratch[:num_elements] = piece
        scratch[num_elements:] = _PADDING[self._dtype]
        return scratch

    @staticmethod
    def _rows(array: Array) -> Array:
        return array.reshape(-1, ROW)


def _is_held(piece: Array) -> bool:
    if piece.dtype.itemsize < 8 or piece.dtype.kind not in "iu":
        return True
    return int(piece.min()) >= -_LARGEST_INTEGER and int(piece.max()) <= _LARGEST_INTEGER


def _count(mask: Array) -> int:
    return int(np.count_nonzero(mask))


def _total(x_rows: Array, y_rows: Array) -> float:
    return float(np.vecdot(x_rows, y_rows).sum(dtype=np.float64))
