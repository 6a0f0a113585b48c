"""Detailed distances of two tensors: representable values between them, sizes, slices, and guesses at the mistake.

Pure functions of two tensors of one shape, each one pass in blocks; nothing here is computed unless asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from glassengine import blocks as block_sums
from glassengine.blocks import blocks, widen
from glassengine.blocks.arrays import error_stream_of, values_of
from glassengine.blocks.pieces import one_thread
from glassengine.numerics.slices import figures_of
from glassengine.results import (
    Altered,
    ElementDifference,
    Figures,
    Hint,
    SliceMaxima,
    TensorValues,
    UlpDistance,
)

__all__ = ["slice_maxima", "ulp_distance"]

# Longer axes are summarized in steps, so that the result stays small.
_MAX_SLICES = 1 << 16

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POWERS = 2 ** np.arange(64, dtype=np.uint64)

Array = np.ndarray[Any, np.dtype[Any]]


def ulp_distance(baseline: Tensor, candidate: Tensor) -> UlpDistance:
    """Return the distances in units in the last place: 1 between neighboring values of the dtype.

    Args:
        baseline: Any floating dtype.
        candidate: The same dtype and shape.

    Raises:
        ValueError: The shapes differ, or the dtypes are not one floating dtype.
    """
    if baseline.dtype != candidate.dtype or not baseline.dtype.is_floating_point:
        raise ValueError(f"distances in ulp need one floating dtype: {baseline.dtype} and {candidate.dtype}")
    histogram = np.zeros(65, dtype=np.int64)
    num_finite = num_mismatched = largest = 0
    worst = None
    for start, (b, c) in blocks(baseline, candidate):
        x, y = widen(b).numpy(), widen(c).numpy()
        finite = np.isfinite(x) & np.isfinite(y)
        agree = (x == y) | (np.isnan(x) & np.isnan(y))
        num_finite += int(np.count_nonzero(finite))
        num_mismatched += int(np.count_nonzero(~finite & ~agree))
        keys_b, keys_c = _keys(b), _keys(c)
        # Wraps around as unsigned numbers do: the distance of two 64-bit keys may not fit into 63 bits.
        distance = np.maximum(keys_b, keys_c).view(np.uint64) - np.minimum(keys_b, keys_c).view(np.uint64)
        distance[~finite] = 0
        position = int(distance.argmax())
        if distance[position] > largest:
            largest, worst = int(distance[position]), start + position
        histogram += np.bincount(np.searchsorted(_POWERS, distance[finite], side="right"), minlength=65)
    return UlpDistance(
        num_finite=num_finite,
        num_nonfinite_mismatch=num_mismatched,
        max_ulp=largest if num_finite else None,
        worst_index=_index(worst, baseline),
        histogram=tuple(np.trim_zeros(histogram, "b").tolist()),
    )


@one_thread()
def slice_maxima(baseline: Tensor, candidate: Tensor) -> tuple[SliceMaxima, ...]:
    """Return, for every axis, the largest |c - b| of every index along it: which rows, columns, tokens are hit.

    Args:
        baseline: Any dtype with n dimensions.
        candidate: Same shape; any dtype.

    Returns:
        n results in the order of the axes; none for a 0-d tensor.

    Raises:
        ValueError: The shapes differ.
    """
    shape = tuple(baseline.shape)
    steps = [max(1, -(-size // _MAX_SLICES)) for size in shape]
    maxima = [torch.zeros(-(-size // step), dtype=torch.float64) for size, step in zip(shape, steps, strict=True)]
    start = 0
    for error in _errors(baseline, candidate):
        position = torch.arange(start, start + error.size)
        start += error.size
        for axis, size in enumerate(shape):
            index = position // math.prod(shape[axis + 1 :]) % size // steps[axis]
            maxima[axis].scatter_reduce_(0, index, torch.from_numpy(error), "amax")
    return tuple(
        SliceMaxima(axis, size, step, tuple(found.tolist()))
        for axis, (size, step, found) in enumerate(zip(shape, steps, maxima, strict=True))
    )


def _errors(baseline: Tensor, candidate: Tensor) -> Iterator[Array]:
    """Yield |c - b| piece by piece, inf where exactly one side is not finite or they differ in kind."""
    for error in error_stream_of(values_of(baseline).array, values_of(candidate).array, relative=False)():
        yield np.nan_to_num(error, copy=False, nan=math.inf, posinf=math.inf)


def _keys(piece: Tensor) -> Array:
    """Return integers in the order of the values of `piece`, one apart for neighboring values."""
    bits = piece.view(_INTEGERS[piece.dtype.itemsize])
    magnitude = bits.to(torch.int64) & torch.iinfo(bits.dtype).max
    keys = torch.where(bits < 0, -magnitude, magnitude)
    if piece.dtype == torch.float8_e8m0fnu:  # powers of two without a sign
        keys = bits.view(torch.uint8).to(torch.int64)
    return cast(Array, keys.numpy())


def _index(position: int | None, tensor: Tensor) -> tuple[int, ...] | None:
    return None if position is None else tuple(int(i) for i in np.unravel_index(position, tuple(tensor.shape)))


_NUM_WORST = 12
_MOST_PIECES = 256


def tensor_values(baseline: Tensor, candidate: Tensor) -> TensorValues:
    """Return the worst elements, distances in ulp, and the largest error along every axis.

    Args:
        baseline: Any dtype.
        candidate: Same shape; any dtype.

    Raises:
        ValueError: The shapes differ.
    """
    axes = tuple(map(_binned, slice_maxima(baseline, candidate)))
    has_ulp = baseline.dtype == candidate.dtype and baseline.dtype.is_floating_point
    return TensorValues(
        worst_elements(baseline, candidate),
        ulp_distance(baseline, candidate) if has_ulp else None,
        axes,
    )


def worst_elements(baseline: Tensor, candidate: Tensor) -> tuple[ElementDifference, ...]:
    """Return at most 12 elements that differ, the largest difference first; of equal ones the first.

    A complex element is given by its magnitude.

    Args:
        baseline: Any dtype.
        candidate: Same shape; any dtype.
    """
    flat = [side.detach().reshape(-1) for side in (baseline, candidate)]
    if not flat[0].numel():
        return ()
    wide = [side if side.is_complex() else side.to(torch.float64) for side in flat]
    same = (wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan())
    error = (wide[1] - wide[0]).abs().to(torch.float64).nan_to_num(nan=math.inf).masked_fill(same, -1.0)
    number = min(_NUM_WORST, len(error))
    least = torch.topk(error, number).values[-1]
    # Of many that are as large, the first: `topk` takes any.
    above, equal = (torch.nonzero(mask).flatten() for mask in (error > least, error == least))
    places = torch.cat([above, equal[: number - len(above)]])
    places = places[torch.sort(error[places], descending=True, stable=True).indices]
    shape = tuple(baseline.shape)
    found = []
    for place in places.tolist():
        if error[place] >= 0:
            index = tuple(int(one) for one in torch.unravel_index(torch.tensor(place), shape)) if shape else ()
            found.append(ElementDifference(index, *(_number(side[place]) for side in wide)))
    return tuple(found)


def _number(element: Tensor) -> float:
    return float(element.abs() if element.is_complex() else element)


def _binned(found: SliceMaxima) -> SliceMaxima:
    """Return the maxima of at most `_MOST_PIECES` pieces of an axis."""
    more = max(1, -(-len(found.maxima) // _MOST_PIECES))
    maxima = tuple(max(found.maxima[at : at + more]) for at in range(0, len(found.maxima), more))
    return dataclasses.replace(found, step=found.step * more, maxima=maxima)


def measure(
    baseline: Tensor, candidate: Tensor, *, rtol: float, atol: float, device: str | torch.device = "cpu"
) -> Figures:
    """Return the figures of `candidate` against `baseline` in one bounded-memory pass.

    Counts, `max_abs_diff` and `worst_index` are exact, means and ratios good to 1e-6 (see `blocks.difference`). Means,
    cosine and SNR are over elements that are finite on both sides. When some element is finite on one side only (or
    the kinds of non-finite value differ), `max_abs_diff` and `max_rel_diff` are inf and `worst_index` is the first
    such element. Of complex tensors the magnitudes are given. Defined for the rest: nothing to compare or both sides
    zero: cosine 1; one side zero: cosine 0; no error: SNR inf; a zero baseline with an error: SNR -inf.

    Args:
        baseline: Any dtype and strides.
        candidate: Same shape; any dtype and strides.
        rtol: Relative tolerance behind `num_beyond_tolerance`.
        atol: Absolute tolerance behind `num_beyond_tolerance`.
        device: Where the arithmetic runs; it must know float64.

    Raises:
        ValueError: The shapes differ.
    """
    raw = block_sums.difference(baseline, candidate, rtol=rtol, atol=atol, device=device)
    return figures_of(raw, tuple(baseline.shape), rtol=rtol, atol=atol)


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
    if left <= _CLOSE and f"{factor:.6g}" != "1":
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
