"""Hints from two records alone, without a program: another tensor instead of one, or its slices moved.

It is what a conversion of weights gets wrong: gate for up, keys for values, heads and halves in another order, a square
matrix transposed. A hint is given only for what makes the candidate's tensor up to the rounding of the coarser dtype.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from glassengine.blocks.arrays import PIECE_ELEMENTS, Array, ArrayValues, widened
from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.matching.sources import SourceWrapper
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.limits import is_floating
from glassengine.numerics.orders import called, order_of_slices
from glassengine.recording.layout.layout import Entry
from glassengine.results import Altered, Hint

_CERTAIN, _APART = 4.0, 8.0
"""A proof leaves so many roundings at most, and the tensor as it is so many times as much (see decision 028)."""
_MOST_OTHERS, _LARGEST = 64, 1 << 24
_SAMPLED_ROWS = 8
_WORDS = ("elements", "rows", "columns")


def rearranged(match: MatchedPair, left: SourceWrapper, right: SourceWrapper) -> tuple[Hint, ...]:
    """Return what makes the candidate's tensor of the baseline's tensors; nothing where nothing does up to rounding."""
    if len(match.candidates) != 1 or match.rule is not None or not 4 <= math.prod(match.baseline.shape) <= _LARGEST:
        return ()
    ours, theirs = left.values(match.baseline), right.values(match.candidates[0])
    if ours.array.shape != theirs.array.shape or ours.dtype.startswith("complex") or not is_floating(theirs.dtype):
        return ()
    if not np.isfinite(theirs.array).all():
        return ()
    proof = _Proof(ours, theirs)
    found = _another(proof, match, left, right) or _order(proof) or _transposed(proof)
    return () if found is None else (found,)


class _Proof:
    """Whether a tensor is what the candidate has, and the baseline's is not."""

    def __init__(self, ours: ArrayValues, theirs: ArrayValues) -> None:
        self.ours, self.theirs = ours.array, theirs.array
        rounding = max(unit_roundoff(one.dtype) for one in (ours, theirs) if is_floating(one.dtype))
        self.size = _size(self.theirs)
        self._rounding, self._error = _CERTAIN * rounding * self.size, _distance(self.ours, self.theirs)

    def left(self, made: Array) -> float | None:
        """Return the share of the error that is left; None where it is more than rounding."""
        if not self.may_hold(made, slice(None, _SAMPLED_ROWS)):
            return None
        left = _distance(made, self.theirs)
        holds = left <= self._rounding and left * _APART <= self._error and self._error > 0
        return left / self._error if holds else None

    def may_hold(self, made: Array, rows: slice) -> bool:
        """Whether some rows leave no more than all may: most tensors are ruled out without a look at the others.

        Args:
            made: These rows, or all.
            rows: Which rows of the candidate's tensor the first of `made` are.
        """
        theirs = self.theirs[rows]
        difference = made[: len(theirs)].astype(np.float64) - theirs
        most = self._rounding * math.sqrt(self.theirs.size) * (1 + 1e-9)
        return math.sqrt(float(np.square(difference).sum())) <= most

    @property
    def is_as_large(self) -> bool:
        """Whether both have the norm of one tensor in two orders."""
        return abs(_size(self.ours) - self.size) <= self._rounding * (1 + 1e-9)


def _another(proof: _Proof, match: MatchedPair, left: SourceWrapper, right: SourceWrapper) -> Hint | None:
    own = match.baseline
    alike = (entry for entry in left.entries if _is_alike(entry, own) and entry.site != own.site)
    for entry in itertools.islice(alike, _MOST_OTHERS):
        if left.can_be_cut(entry):
            some, _ = left.rows(entry, 0, min(_SAMPLED_ROWS, entry.shape[0]))
            if not proof.may_hold(widened(some).array, slice(None, _SAMPLED_ROWS)):
                continue
        other = left.values(entry)
        share = proof.left(other.array)
        if share is None:
            continue
        theirs = next((one for one in right.entries if _is_alike(one, entry) and one.site == entry.site), None)
        is_mutual = theirs is not None and _Proof(other, right.values(theirs)).left(proof.ours) is not None
        text = f"{own.site} and {entry.site} are exchanged" if is_mutual else f"it holds {entry.site}"
        change = Altered(operands=(entry.site,))
        return Hint("swapped", text, 1.0, evidence="values", proven=True, change=change, unexplained=share)
    return None


def _is_alike(one: Entry, other: Entry) -> bool:
    places = (one.step, one.rank, one.shape) == (other.step, other.rank, other.shape)
    return places and not any(entry.dtype.startswith("complex") for entry in (one, other))


def _order(proof: _Proof) -> Hint | None:
    if not proof.is_as_large:
        return None
    ours, theirs = (side.astype(np.float64) for side in (proof.ours, proof.theirs))
    for axis in range(ours.ndim):
        order = order_of_slices(ours, theirs, axis, 1.0)
        share = None if order is None else proof.left(ours.take(order, axis))
        if order is None or share is None:
            continue
        import torch

        kind, how = called(torch.from_numpy(order))
        what = _WORDS[axis + 1] if ours.ndim == 2 else _WORDS[0] if ours.ndim == 1 else f"axis {axis}"
        change = Altered(axis=axis)
        return Hint(kind, f"{what} {how}", 1.0, evidence="values", proven=True, change=change, unexplained=share)
    return None


def _transposed(proof: _Proof) -> Hint | None:
    shape = proof.ours.shape
    for a in range(len(shape)):
        for b in range(a):
            share = proof.left(proof.ours.swapaxes(a, b)) if shape[a] == shape[b] > 1 else None
            if share is not None:
                text = f"transposed (axes {b} and {a})"
                return Hint("transposed", text, 1.0, evidence="values", proven=True, unexplained=share)
    return None


def _size(value: Array) -> float:
    squares = float(np.square(value, dtype=np.float64).mean())
    return math.sqrt(squares) if math.isfinite(squares) else math.inf


def _distance(one: Array, other: Array) -> float:
    """Return the root mean square of a difference, in pieces: infinity where something is not finite."""
    a, b, squares = one.reshape(-1), other.reshape(-1), 0.0
    with np.errstate(all="ignore"):
        for start in range(0, len(a), PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            squares += float(np.square(a[piece].astype(np.float64) - b[piece]).sum())
    return math.sqrt(squares / len(a)) if math.isfinite(squares) else math.inf
