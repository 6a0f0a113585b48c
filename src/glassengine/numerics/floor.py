"""The noise floor of a tensor: how far it gets from its float64 reference by rounding alone, slice by slice.

It comes from runs that differ from the reference by rounding alone (the same program in its own dtype, and Monte-Carlo
rounding runs):

    floor_s^2 = max( mean_s(D^2) over the runs, mean(D^2), r^2 mean(P^2), r^2 mean_s(P^2), (u^2 / 3) mean(P^2),
                     tiny^2 / 3 )

P is the reference, D the error of a noise run, r the largest rms(D) / rms(P) of this site so far, u the unit
roundoff and tiny the largest error of rounding near zero (`smallest_precise`). The two terms with r keep a short slice
(one element, in a decode step) from an underestimated floor; the one per slice matters where a few large elements
hold nearly all of the power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glassengine.numerics.judgement import relative_from, smallest_precise, unit_roundoff
from glassengine.numerics.mask_values import is_below, sentinel
from glassengine.numerics.slice_means import Counted, SliceMeans, slice_means


@dataclass(frozen=True)
class Floor:
    """The floor of one tensor.

    Attributes:
        by_axis: For each axis the square of the floor of every index of it, float64 [size].
        least: The smallest of them, which is that of the whole tensor.
        relative: The largest rms(D) / rms(P) of the site so far, this tensor's among them.
        largest: No element of the reference is larger.
        special: Elements that are compared as a class, not by size: mask sentinels and what is not finite. None if
            there are none.
        counted: Elements that enter the statistics: those that are judged and not special.
    """

    by_axis: list[torch.Tensor]
    least: float
    relative: float
    largest: float
    special: torch.Tensor | None
    counted: Counted


def measured_floor(
    exact: torch.Tensor,
    runs: Sequence[torch.Tensor],
    judged: torch.Tensor | None,
    *,
    hidden: torch.Tensor | None,
    dtype: torch.dtype,
    relative: float,
) -> Floor:
    """Measure the floor of a floating tensor.

    Args:
        exact: P, float64.
        runs: The same tensor of runs that only round.
        judged: Bool mask in its shape of the elements that are judged; None where all are.
        hidden: Elements that hide a place from a softmax, as in `Known`.
        dtype: Floating dtype in which the tensor is computed.
        relative: Largest rms(D) / rms(P) seen for the site so far.
    """
    limit, special = sentinel(dtype), None
    finite_power = exact.square()
    (of_power,) = slice_means([finite_power], counted := Counted(judged))
    # No element is larger than the root of the sum of squares, which is NaN where one of them is.
    largest = of_power.total**0.5
    if hidden is not None or (not largest < limit and not is_below(exact, limit)):
        special = ~exact.isfinite() | (exact.abs() >= limit)
        if hidden is not None:
            special |= hidden
        finite_power = torch.where(exact.isfinite(), finite_power, 0.0)
        (of_power,) = slice_means([finite_power], counted := Counted(~special if judged is None else judged & ~special))
    of_runs = _of_runs(exact, runs, counted)
    power, whole = of_power.mean, max((means.mean for means in of_runs), default=0.0)
    # Near zero rounding is large, which does not apply to other steps.
    if power > relative_from(dtype) ** 2:
        relative = max(relative, (whole / power) ** 0.5)
    share = max(relative**2, unit_roundoff(dtype) ** 2 / 3)
    least = max(whole, power * share, smallest_precise(dtype) ** 2 / 3)
    by_axis = []
    for axis, by_index in enumerate(of_power.by_axis):
        means = [run.by_axis[axis] for run in of_runs]
        by_axis.append(torch.stack([*means, share * by_index]).amax(0).clamp(min=least))
    return Floor(by_axis, least, relative, largest, special, counted)


def _of_runs(exact: torch.Tensor, runs: Sequence[torch.Tensor], counted: Counted) -> list[SliceMeans]:
    squares = [(run.double() - exact).square_() for run in runs]
    found = slice_means(squares, counted)
    for i, means in enumerate(found):
        if not means.total < math.inf:
            (found[i],) = slice_means([squares[i].nan_to_num_(0.0, 0.0, 0.0)], counted)
    return found
