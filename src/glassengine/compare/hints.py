"""Guesses at the kind of mistake, from the tensors and the two programs alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from glassengine.results import Hint

_CLOSE = 0.02
"""A hypothesis explains an error when it leaves at most this fraction of it."""


def tensor_hints(baseline: torch.Tensor, candidate: torch.Tensor, valid: torch.Tensor | None) -> list[Hint]:
    """Return hints from one flagged tensor: constant factor, constant offset, swapped sign, a single slice.

    Args:
        baseline: float64 reference.
        candidate: The flagged tensor, same shape.
        valid: Mask of elements that count.
    """
    if baseline.shape != candidate.shape or not candidate.is_floating_point():
        return []
    keep = baseline.isfinite() & candidate.isfinite()
    keep = keep if valid is None else keep & valid
    a, b = baseline[keep], candidate.double()[keep]
    error = float((b - a).norm())
    if a.numel() < 4 or error == 0:
        return []
    hints = []
    power = float(a.square().sum())
    factor = float((a * b).sum()) / power if power else 0.0
    if float((b - factor * a).norm()) <= _CLOSE * error:
        kind = "sign" if abs(factor + 1) < 1e-3 else "scale"
        hints.append(Hint(kind, f"the candidate is {factor:.6g} times the baseline", 0.9))
    offset = float((b - a).mean())
    if float((b - a - offset).norm()) <= _CLOSE * error:
        hints.append(Hint("offset", f"the candidate is the baseline plus {offset:.6g}", 0.8))
    hints += _concentrated(baseline, candidate, keep)
    return hints


def weight_hints(
    names: Sequence[str], baseline: Mapping[str, torch.Tensor], candidate: Mapping[str, torch.Tensor]
) -> list[Hint]:
    """Return a hint for every weight of `names` (parameters the op uses) that differs between the two sides."""
    hints = []
    for name in names:
        if name not in candidate:
            continue
        ours, theirs = baseline[name], candidate[name]
        if ours.shape != theirs.shape:
            hints.append(
                Hint(
                    "weight",
                    f"{name.removeprefix('user.')} has shape {tuple(theirs.shape)}, baseline {tuple(ours.shape)}",
                    1.0,
                )
            )
            continue
        rounded = ours.to(theirs.dtype)
        count = int((rounded != theirs).sum())
        if not count:
            continue
        shown = name.removeprefix("user.")
        text = f"weight {shown} differs in {count} of {ours.numel()} elements"
        twin = next(
            (
                n
                for n, t in baseline.items()
                if n != name and t.shape == theirs.shape and torch.equal(t.to(theirs.dtype), theirs)
            ),
            None,
        )
        hints.append(
            Hint("weight", text + (f"; it equals the baseline's {twin.removeprefix('user.')}" if twin else ""), 1.0)
        )
    return hints


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
            return [Hint("slice", f"the error is in index {index} of axis {axis} (of {square.shape[axis]}) alone", 0.7)]
    return []
