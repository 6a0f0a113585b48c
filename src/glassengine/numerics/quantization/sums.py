"""Sums over the elements of a quantized weight, in one pass and in float64; see `weight_error`.

b, c        the unquantized and the quantized weight, [O, I]
e           (c - b) / step
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from glassengine.blocks import BLOCK_ELEMENTS

MOST_ELEMENT = 1.5
"""Steps beyond which an element that is not at an end counts as far away."""
LEAST_GROUP = 16
"""Minimum number of elements of a meaningful mean."""
_SPARSE = 17
"""One of so many errors is kept, to see how they are distributed; of any place in a group."""


class Sums:
    """Everything that is added up over the elements of a matrix, some rows at a time.

    Attributes:
        groups: For each block of rows [8, groups]: step, elements not at an end, elements, and the sums over them of
            e, e^2 (not at an end), b^2, b c, c^2.
        columns: [3, I]: sums of b^2, b c, c^2.
        bounded: Sum of e^2, an end of the range counting half a step at most.
        noise: Sum of (c - b)^2.
        largest: The largest |e| not at an end.
        num_far: How many of them are beyond `MOST_ELEMENT`.
        num_inside: Elements not at an end.
        num_quantized: Elements that are quantized.
        inside: Sums of b^2, b c and step^2 / 12 (what rounding to nearest leaves) over elements not at an end.
        rows: For each block of rows [6, rows]: sums of b^2, b d, d^2, (b d)^2, b^3 d and b^4, d being c - b.
        moved: Sum of d.
        total: Sum of b.
        sample: Some |e| not at an end.
    """

    def __init__(self, b: Tensor, c: Tensor, step: Tensor) -> None:
        self.groups: list[Tensor] = []
        self.columns = torch.zeros((3, b.shape[1]), dtype=torch.float64)
        self.bounded = self.noise = self.largest = 0.0
        self.num_far = self.num_inside = self.num_quantized = 0
        self.inside = torch.zeros(3, dtype=torch.float64)
        self.rows: list[Tensor] = []
        self.moved = self.total = 0.0
        self.is_finite = True
        samples = []
        # Groups of inputs that were sorted by their size, as GPTQ does, lie in pieces.
        first = step[:LEAST_GROUP].abs()
        is_sorted = int((first.diff(dim=1) != 0).sum()) * LEAST_GROUP > first.numel()
        at_once = max(1, BLOCK_ELEMENTS // b.shape[1])
        for start in range(0, len(b), at_once):
            rows = slice(start, start + at_once)
            samples.append(self._add(b[rows].double(), c[rows].double(), step[rows].double(), is_sorted))
        sample = torch.cat(samples)
        self.sample = sample[:: max(1, sample.numel() // 65536)]
        bb, bc, cc = (float(total) for total in self.columns.sum(1))
        self.slope = bc / bb if bb > 0 else 1.0
        self.correlation = bc / math.sqrt(bb * cc) if bb * cc > 0 else float(bb == cc)

    def _add(self, b: Tensor, c: Tensor, step: Tensor, is_sorted: bool) -> Tensor:
        """Add some rows; return some |e| not at an end."""
        self.is_finite &= math.isfinite(float(c.sum()))
        difference, size, is_inside = c - b, step.abs(), step > 0
        every = difference / size.where(size > 0, math.inf)
        inside = is_inside.double()
        products = b * b, b * c, c * c
        totals = [_dot(products[0], inside), _dot(products[1], inside), _dot(step * step, inside) / 12]
        self.inside += torch.stack(totals)
        along, power = b * difference, products[0]
        sixth = power, along, difference * difference, along * along, power * along, power * power
        self.rows.append(torch.stack([one.sum(1) for one in sixth]))
        self.moved, self.total = self.moved + float(difference.sum()), self.total + float(b.sum())
        self.noise += float(_dot(difference, difference))
        self.num_quantized += int((size > 0).sum())
        self.columns += torch.stack([one.sum(0) for one in products])
        e = every * inside
        at_ends, far = (every - e).clamp_(-0.5, 0.5), e.abs()
        self.bounded += float(_dot(e, e) + _dot(at_ends, at_ends))
        self.largest = max(self.largest, float(far.max()))
        self.num_far += int((far > MOST_ELEMENT).sum())
        self.num_inside += int(is_inside.sum())
        values: list[Tensor] = [inside, e, e * e, *products]
        if is_sorted:
            size, order = size.sort(dim=1, stable=True)
            values = [one.gather(1, order) for one in values]
        starts = np.ones(size.shape, dtype=bool)
        starts[:, 1:] = size.diff(dim=1).numpy() != 0
        first = np.flatnonzero(starts)
        count = torch.from_numpy(np.diff(first, append=size.numel())).double()
        own, *rest = (torch.from_numpy(np.add.reduceat(one.flatten().numpy(), first)) for one in values)
        self.groups.append(torch.stack([size.flatten()[torch.from_numpy(first)], own, count, *rest]))
        return far.flatten()[::_SPARSE][is_inside.flatten()[::_SPARSE]].float()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten(), b.flatten())
