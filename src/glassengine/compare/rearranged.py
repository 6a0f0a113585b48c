"""What two records show of a mistake without any program: another tensor instead of one, or its slices moved.

It is what a conversion of weights gets wrong: gate for up, keys for values, heads and halves in another order, a square
matrix transposed. Said is only what makes the candidate's tensor up to the rounding of the coarser dtype.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from glassengine.compare.matching.matching import Match
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.metrics.orders import called, order_between
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource
from glassengine.results import Altered, Hint

if TYPE_CHECKING:
    from torch import Tensor

_CERTAIN, _APART = 4.0, 8.0
"""A proof leaves so many roundings at most, and the tensor as it is so many times as much (see decision 028)."""
_MOST_OTHERS, _LARGEST = 64, 1 << 24
_WORDS = ("elements", "rows", "columns")


def rearranged(match: Match, left: TensorSource, right: TensorSource) -> tuple[Hint, ...]:
    """Return what makes the candidate's tensor of the baseline's tensors; nothing where nothing does up to rounding.

    Args:
        match: The pair that is asked about.
        left: The baseline.
        right: The candidate.
    """
    if len(match.candidates) != 1 or match.rule is not None:
        return ()
    ours, theirs = left.tensor(match.baseline), right.tensor(match.candidates[0])
    if ours.shape != theirs.shape or ours.is_complex() or not theirs.is_floating_point():
        return ()
    if not 4 <= ours.numel() <= _LARGEST:
        return ()
    if not bool(theirs.double().isfinite().all()):
        return ()
    proof = _Proof(ours, theirs)
    found = _another(proof, match, left, right) or _order(proof) or _transposed(proof)
    return () if found is None else (found,)


class _Proof:
    """Whether a tensor is what the candidate has, and the baseline's is not."""

    def __init__(self, ours: Tensor, theirs: Tensor) -> None:
        self.ours, self.theirs = ours.double(), theirs.double()
        floats = [t.dtype for t in (ours, theirs) if t.is_floating_point()]
        self._rounding = _CERTAIN * max(map(unit_roundoff, floats)) * _size(self.theirs)
        self._error = _size(self.ours - self.theirs)

    def left(self, made: Tensor) -> float | None:
        """Return the share of the error that is left; None where it is more than rounding."""
        left = _size(made.double() - self.theirs)
        holds = left <= self._rounding and left * _APART <= self._error and self._error > 0
        return left / self._error if holds else None


def _another(proof: _Proof, match: Match, left: TensorSource, right: TensorSource) -> Hint | None:
    own = match.baseline
    alike = (entry for entry in left.entries if _is_alike(entry, own) and entry.site != own.site)
    for entry in itertools.islice(alike, _MOST_OTHERS):
        other = left.tensor(entry)
        share = proof.left(other)
        if share is None:
            continue
        theirs = next((one for one in right.entries if _is_alike(one, entry) and one.site == entry.site), None)
        is_mutual = theirs is not None and _Proof(other, right.tensor(theirs)).left(proof.ours) is not None
        text = f"{own.site} and {entry.site} are exchanged" if is_mutual else f"it holds {entry.site}"
        change = Altered(operands=(entry.site,))
        return Hint("swapped", text, 1.0, evidence="values", proven=True, change=change, unexplained=share)
    return None


def _is_alike(one: Entry, other: Entry) -> bool:
    places = (one.step, one.rank, one.shape) == (other.step, other.rank, other.shape)
    return places and not any(entry.dtype.startswith("complex") for entry in (one, other))


def _order(proof: _Proof) -> Hint | None:
    ours = proof.ours
    for axis in range(ours.dim()):
        order = order_between(ours, proof.theirs, axis, 1.0)
        share = None if order is None else proof.left(ours.index_select(axis, order))
        if order is None or share is None:
            continue
        kind, how = called(order)
        what = _WORDS[axis + 1] if ours.dim() == 2 else _WORDS[0] if ours.dim() == 1 else f"axis {axis}"
        change = Altered(axis=axis)
        return Hint(kind, f"{what} {how}", 1.0, evidence="values", proven=True, change=change, unexplained=share)
    return None


def _transposed(proof: _Proof) -> Hint | None:
    shape = proof.ours.shape
    for a in range(len(shape)):
        for b in range(a):
            share = proof.left(proof.ours.transpose(a, b)) if shape[a] == shape[b] > 1 else None
            if share is not None:
                text = f"transposed (axes {b} and {a})"
                return Hint("transposed", text, 1.0, evidence="values", proven=True, unexplained=share)
    return None


def _size(value: Tensor) -> float:
    return float(value.square().mean().sqrt()) if bool(value.isfinite().all()) else float("inf")
