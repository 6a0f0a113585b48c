"""Elements and axes of two tensors: which element, head or token it is that differs."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from glassengine.numerics.metrics.distances import slice_maxima, ulp_distance
from glassengine.results import ElementDifference, SliceMaxima, TensorValues

__all__ = ["tensor_values", "worst_elements"]

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
