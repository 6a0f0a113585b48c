"""The sums of how two tensors differ, as plain numbers, and how those of parts are joined: without any tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
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


class Sums:
    """The running sums behind `difference`; the attributes are the fields of `Difference` but `num_elements`."""

    def __init__(self) -> None:
        self.num_finite = self.num_different = self.num_mismatched = self.num_beyond = self.num_nonzero = 0
        self.sum_abs = self.sum_squares = self.max_abs = self.sum_rel = self.max_rel = 0.0
        self.dot = self.baseline_squares = self.candidate_squares = 0.0
        self.worst: int | None = None
        self.baseline_at_worst: float | None = None
        self.candidate_at_worst: float | None = None

    def merge(self, part: Sums) -> None:
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


def merged(parts: Sequence[tuple[int, Difference]]) -> Difference:
    """Return the sums of consecutive parts of one tensor, each with the flat position of its first element."""
    total = Sums()
    for start, part in parts:
        sums = Sums()
        vars(sums).update((name, value) for name, value in vars(part).items() if name != "num_elements")
        sums.worst = None if part.worst is None else start + part.worst
        total.merge(sums)
    return Difference(sum(part.num_elements for _, part in parts), **vars(total))
