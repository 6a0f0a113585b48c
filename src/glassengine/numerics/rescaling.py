"""Weights that were scaled before they were quantized, and a layer next to them by the inverse (AWQ, SmoothQuant).

    quantized = rows x unquantized x columns          fitted, alternately, by least squares

A scale that nothing undoes is a mistake. What undoes it is found by its values: columns are undone by an unquantized
vector (a norm before them) or by the rows of another matrix (the product before them) that were divided by the same.

Shape legend: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDS = 8
_SAME = 0.05
"""Median difference of logarithms up to which two vectors of factors are one: they are fitted to rounded weights."""
_NONE = 0.02
"""The same, up to which factors are 1."""


@dataclass(frozen=True)
class Factors:
    """The scales of one matrix: `rows` [O] and `columns` [I], float64."""

    rows: Tensor
    columns: Tensor

    def scaled(self, weight: Tensor) -> Tensor:
        """Return a matrix [O, I] with its rows and columns scaled."""
        return weight.double() * self.rows[:, None] * self.columns

    def undone(self, weight: Tensor) -> Tensor:
        """Return the inverse of `scaled`."""
        return weight.double() / self.rows[:, None] / self.columns


def fit(baseline: Tensor, candidate: Tensor) -> Factors | None:
    """Return the factors between two matrices [O, I]; None where they are not positive numbers."""
    b, c = baseline.double(), candidate.double()
    rows, columns = torch.ones(len(b), dtype=torch.float64), torch.ones(b.shape[1], dtype=torch.float64)
    for _ in range(_ROUNDS):
        scaled = b * rows[:, None]
        columns = (c * scaled).sum(0) / scaled.square().sum(0)
        scaled = b * columns
        rows = (c * scaled).sum(1) / scaled.square().sum(1)
        # One number may go either way: the rows take none of it.
        middle = rows.median()
        rows, columns = rows / middle, columns * middle
    both = torch.cat([rows, columns])
    if not bool((torch.isfinite(both) & (both > 0)).all()):
        return None
    return Factors(rows, columns)


def undone(factors: Mapping[str, Factors], vectors: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Factors]:
    """Return the matrices whose factors other weights undo, and the factors as those weights have them.

    What was fitted only finds the weights that undo it: it would take a mistake in some rows for a scale of them.

    Args:
        factors: Name of a matrix -> its factors, as fitted.
        vectors: Unquantized vectors of the baseline, each with the candidate's.
    """
    ratios = []
    for ours, theirs in vectors:
        # Gemma's norms multiply by one more than their weight.
        ratios += [theirs.double() / ours.double(), (1 + theirs.double()) / (1 + ours.double())]
    left = {name: _settled(found, ratios) for name, found in factors.items()}
    while True:
        kept: dict[str, Factors] = {}
        for name, found in left.items():
            others = [other for key, other in left.items() if key != name]
            columns = _undoing(found.columns, [*ratios, *(other.rows for other in others)])
            rows = _undoing(found.rows, [other.columns for other in others])
            if columns is not None and rows is not None:
                kept[name] = Factors(rows, columns)
        if len(kept) == len(left):
            return kept
        left = {name: left[name] for name in kept}


def _settled(found: Factors, ratios: Iterable[Tensor]) -> Factors:
    """Return the same factors with the one number that may go either way put where a vector says it belongs."""
    for ratio in ratios:
        if ratio.shape == found.columns.shape:
            apart = (ratio * found.columns).log().nan_to_num(9.0)
            shift = apart.median()
            if float((apart - shift).abs().median()) < _SAME and not _is_one(found.columns / found.columns.median()):
                return Factors(found.rows * shift.exp(), found.columns / shift.exp())
    return found


def is_undone_vector(ours: Tensor, theirs: Tensor, factors: Iterable[Factors]) -> bool:
    """Whether the columns or rows of a rescaled matrix explain the difference of an unquantized vector."""
    known = [vector for found in factors for vector in (1 / found.columns, found.rows)]
    # Up to one number, which may be with the rows or with the columns of the matrix.
    ratios = theirs.double() / ours.double(), (1 + theirs.double()) / (1 + ours.double())
    return any(_is_inverse(ratio.median() / ratio, vector / vector.median()) for ratio in ratios for vector in known)


def _is_one(factors: Tensor) -> bool:
    return float(factors.log().abs().median()) < _NONE


def _undoing(factors: Tensor, others: Iterable[Tensor]) -> Tensor | None:
    """Return the factors as another weight that undoes them has them; ones where there is nothing to undo."""
    if _is_one(factors):
        return torch.ones_like(factors)
    return next((1 / other for other in others if not _is_one(other) and _is_inverse(factors, other)), None)


def _is_inverse(factors: Tensor, other: Tensor) -> bool:
    return other.shape == factors.shape and float((other * factors).log().abs().nan_to_num(9.0).median()) < _SAME
