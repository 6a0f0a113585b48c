"""Guesses at the kind of mistake, from two tensors alone: nothing is known of what made them."""

from __future__ import annotations

import torch

from glassengine.results import Altered, Hint

_CLOSE = 0.02
"""A hypothesis explains an error when it leaves at most this fraction of it."""


def tensor_hints(baseline: torch.Tensor, candidate: torch.Tensor, valid: torch.Tensor | None) -> list[Hint]:
    """Return hints from one flagged tensor: constant factor, constant offset, swapped sign, a single slice.

    Args:
        baseline: float64 reference.
        candidate: The flagged tensor, same shape.
        valid: Mask of elements that count.
    """
    if baseline.shape != candidate.shape or not (baseline.is_floating_point() and candidate.is_floating_point()):
        return []
    broken = _not_numbers(baseline, candidate, valid)
    if broken is not None:
        return [broken]
    keep = baseline.isfinite() & candidate.isfinite()
    keep = keep if valid is None else keep & valid
    a, b = baseline[keep], candidate.double()[keep]
    error = float((b - a).norm())
    if a.numel() < 4 or error == 0:
        return []
    hints = []
    power = float(a.square().sum())
    factor = float((a * b).sum()) / power if power else 0.0
    left = float((b - factor * a).norm()) / error
    if left <= _CLOSE:
        text = f"the candidate is {factor:.6g} times the baseline"
        change = Altered(argument="factor", baseline=1.0, candidate=factor)
        hints.append(Hint("scale", text, 0.45, evidence="values", change=change, unexplained=left))
    offset = float((b - a).mean())
    left = float((b - a - offset).norm()) / error
    if left <= _CLOSE:
        text = f"the candidate is the baseline plus {offset:.6g}"
        change = Altered(argument="offset", baseline=0.0, candidate=offset)
        hints.append(Hint("other", text, 0.4, evidence="values", change=change, unexplained=left))
    hints += _concentrated(baseline, candidate, keep)
    return hints


def _not_numbers(baseline: torch.Tensor, candidate: torch.Tensor, valid: torch.Tensor | None) -> Hint | None:
    """NaN or infinite elements where the baseline has numbers."""
    known = baseline.isfinite() if valid is None else baseline.isfinite() & valid
    for found, words in ((candidate.isnan(), "NaN"), (candidate.isinf(), "infinite: an overflow")):
        count = int((found & known).sum())
        if count:
            verb = "is" if count == 1 else "are"
            return Hint("other", f"{count} of {candidate.numel()} elements {verb} {words}", 0.7, evidence="values")
    return None


def _concentrated(baseline: torch.Tensor, candidate: torch.Tensor, keep: torch.Tensor) -> list[Hint]:
    """One index of one axis holds nearly all of the error."""
    square = torch.where(keep, (candidate.double() - baseline).square(), 0.0)
    total = float(square.sum())
    for axis in range(square.dim()):
        if square.shape[axis] < 4:
            continue
        shares = square.sum([i for i in range(square.dim()) if i != axis]) if square.dim() > 1 else square
        index = int(shares.argmax())
        if float(shares[index]) >= (1 - _CLOSE) * total:
            return [
                Hint(
                    "other",
                    f"the error is in index {index} of axis {axis} (of {square.shape[axis]}) alone",
                    0.35,
                    evidence="values",
                    change=Altered(axis=axis),
                )
            ]
    return []
