"""Is the difference of a quantized weight from the unquantized one quantization, or a mistake?

In units of the step of each element, e = (quantized - unquantized) / step:

    rounding to nearest     |e| <= 1/2 except at the ends of the range, where values are cut off; rms 0.29
    GPTQ and the like       errors make up for one another: rms 0.3 to 0.5, |e| up to 4, means of groups within 0.65
                            (random matrices [128..512, 64..1024], white and correlated inputs, 3, 4 and 8 bits)

    a mistake               rms(e) above 1: the numbers are not those that the step was chosen for;
                            a group moved by more than 0.75 steps: its zero is another;
                            a slope on the unquantized values that is not 1, of a group: its scale is another; of an
                            input: it was scaled, and nothing undoes it;
                            single elements beyond 1.5 steps where all others are rounded to nearest

Sums show less than a step. With d the difference and b the weight, a quantizer may be biased by its noise: the slope of
d on b over the power of the noise is -2.1 to 1.3 (llama.cpp's 22 types, with and without importances, seven
distributions, [256, 512]; -5 where both are below 0.005). Beyond that, a weight or a long row has another factor.

A mean or a slope of a group counts where it is 8 of its standard errors away, so that small groups raise no alarm.
What kind of mistake it is, is tried: in another order, another weight's values, the scales of other groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from glassengine.blocks import BLOCK_ELEMENTS
from glassengine.results import Hint

MOST_RMS = 1.0
MOST_SHIFT = 0.75
MOST_SLOPE = 0.15
MOST_ALL = 0.12
"""Of the slope of all groups: integers of 2 bits, cut off to have a zero in the middle, have one of 0.93."""
_LEAST_FACTOR = 0.01
_OF_ROUNDING = 2.0
"""A factor of the whole weight is a mistake from so many times the relative error of rounding on."""
_LEAST_OF_ALL, _LEAST_OF_ROW = 0.004, 0.01
"""Of all of a weight, whose scale may be stored in bfloat16, and of a row."""
_GROWN, _SHRUNK = 1.5, 2.5
"""What quantizers change of the size of a weight, over the power of their noise: see above."""
_OF_FEW = 2.0
"""How much more that is where few elements have a scale, and some of them are important to the quantizer."""
_LEAST_SHIFT, _SHIFT_OF_MEAN = 0.02, 0.35
"""How far a weight may be moved, over its noise (rms): by itself, and by its own mean over its size."""
_NEAREST = 0.6
"""Where 99 % of the errors are below it, values were rounded to nearest (scales are stored rounded, too)."""
_SIGNIFICANT = 8.0
_RIGHT = 0.8
"""Correlation with the right values; of 2 bit integers it is about 0.9."""
_WRONG = 0.5
_SAMPLE = 256
"""Rows and columns that are looked at to find what a weight is instead."""

_ORDERS = (
    ("AWQ's packing order", (0, 2, 4, 6, 1, 3, 5, 7)),
    ("AWQ's packing order", (0, 4, 1, 5, 2, 6, 3, 7)),
    ("packing from the other end", (7, 6, 5, 4, 3, 2, 1, 0)),
    ("swapped halves of each byte", (1, 0, 3, 2, 5, 4, 7, 6)),
)
"""How eight neighboring integers may be permuted; AWQ's order and its inverse."""


@dataclass(frozen=True)
class WeightError:
    """What a quantized weight's difference looks like.

    Attributes:
        snr_db: Of the weight.
        rms_steps: Root mean square of the difference, in steps; an end of the range counts half a step at most.
        max_steps: The largest, ends of the range excepted; None where everything is an end.
        num_groups: Elements of one row with one step.
        mistakes: What cannot be quantization, the likeliest first; empty where all of it can.
    """

    snr_db: float
    rms_steps: float
    max_steps: float | None
    num_groups: int
    mistakes: tuple[Hint, ...]


def judge_weight(
    baseline: Tensor,
    candidate: Tensor,
    step: Tensor,
    other_weights: Mapping[str, Tensor] | None = None,
    *,
    by_group: bool = True,
) -> WeightError:
    """Judge one quantized weight.

    Args:
        baseline: Unquantized, floating, at least 2 dimensions; the last one is the inputs'.
        candidate: What the quantized weight stands for, the same shape.
        step: Of each element, negative at the ends of the range; 0 for elements that are not quantized.
        other_weights: Name -> unquantized weights of the same shape, which it may be by mistake.
        by_group: Whether groups, inputs and single elements are evidence: not those of a codebook of 1 to 3 bits, which
            is fitted to some elements at the cost of others.
    """
    b, c, s = (x.detach().reshape(-1, x.shape[-1]) for x in (baseline, candidate, step))
    sums = MatrixSums(b, c, s)
    groups = _Groups(torch.cat(sums.groups, 1), sums.slope, sums.correlation)
    mistakes = list(groups.mistakes()) or list(_inputs(sums.columns, len(b)))
    mistakes += _single(sums)
    mistakes = mistakes if by_group else []
    mistakes = mistakes or list(_whole(sums))
    rms = math.sqrt(sums.bounded / max(sums.num_quantized, 1))
    if not sums.is_finite:
        mistakes = [Hint("other", "the quantized weight has NaN values", 1.0, evidence="not a number")]
        rms = math.inf
    elif sums.correlation < _WRONG or (mistakes and sums.correlation < _RIGHT):
        instead = _instead(b, c, other_weights or {}, sums.correlation)
        if instead is not None:
            mistakes = [instead]
        elif sums.correlation < _WRONG and groups.share < _WRONG:
            text = f"its correlation with the unquantized weight is {sums.correlation:.2g}"
            mistakes = [Hint("other", f"{text}: another order, or another weight", 0.7, evidence="not its values")]
    if not mistakes and rms > MOST_RMS:
        mistakes = [
            Hint("other", f"it is {rms:.3g} steps (rms) from the unquantized weight", 0.5, evidence="not its values")
        ]
    power = float(sums.columns[0].sum())
    return WeightError(
        snr_db=10 * math.log10(power / sums.noise) if sums.noise > 0 and power > 0 else math.inf,
        rms_steps=rms,
        max_steps=sums.largest if sums.num_inside else None,
        num_groups=groups.number,
        mistakes=tuple(mistakes),
    )


class _Groups:
    """Means and slopes of the elements that share a row and a step.

    Args:
        sums: [8, groups], as in `MatrixSums`.
        slope: Of all elements.
        correlation: Of all elements.
    """

    def __init__(self, sums: Tensor, slope: float, correlation: float) -> None:
        self.steps, count, all_of, errors, squares, bb, bc, cc = sums
        self.number = len(count)
        n = count.clamp(min=1)
        self.mean = errors / n
        spread = (squares / n - self.mean.square()).clamp(min=0).sqrt()
        enough = (count >= LEAST_GROUP) & (self.steps > 0)
        self.moved = enough & (self.mean.abs() > MOST_SHIFT) & (self.mean.abs() > _SIGNIFICANT * spread / n.sqrt())
        self.slope, error = _slopes(bb, bc, cc, all_of)
        off = (self.slope - 1).abs()
        enough = (all_of >= LEAST_GROUP) & (self.steps > 0)
        self.scaled = enough & (off > MOST_SLOPE) & (off > _SIGNIFICANT * error)
        # Also of bits too few to tell it of one group.
        if correlation > _RIGHT and abs(slope - 1) > MOST_ALL and float(off.median()) > MOST_ALL:
            self.scaled |= enough
        self.share = float((self.scaled | self.moved).double().mean())

    def mistakes(self) -> Iterator[Hint]:
        """Yield what no rounding of a group explains."""
        scaled, moved = int(self.scaled.sum()), int((self.moved & ~self.scaled).sum())
        if scaled:
            slopes = self.slope[self.scaled]
            middle = float(slopes.median())
            where = f"{scaled} of {self.number} groups"
            if scaled > 1 and self._belong_elsewhere():
                yield Hint(
                    "swapped", f"{where} have the scale of another group", 0.9, evidence="scales of other groups"
                )
            elif float((slopes / middle - 1).abs().median()) < MOST_SLOPE:
                yield Hint("scale", f"{where} are {middle:.3g} times what they should be", 0.9, evidence="wrong scale")
            else:
                yield Hint(
                    "scale",
                    f"{where} are {float(slopes.min()):.3g} to {float(slopes.max()):.3g} times",
                    0.8,
                    evidence="wrong scale",
                )
        if moved:
            found = self.mean[self.moved & ~self.scaled]
            where = f"{moved} of {self.number} groups"
            text = f"{where} are moved by {float(found.median()):+.3g} steps: their zero is another"
            yield Hint("other", text, 0.9, evidence="wrong zero")

    def _belong_elsewhere(self) -> bool:
        """Whether the scales that the groups should have are, as a collection, the scales that there are."""
        wanted = (self.steps / self.slope.abs().clamp(min=1e-12)).sort().values
        apart = (wanted / self.steps.sort().values - 1).abs()
        return float(apart.median()) < 0.05 and float((self.slope - 1).abs().median()) > 0.02


def _slopes(bb: Tensor, bc: Tensor, cc: Tensor, number: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return slopes of c on b, and their standard errors with the bias of quantizers, from sums of products."""
    power = bb.clamp(min=1e-300)
    slope = bc / power
    left = (cc - slope.square() * power).clamp(min=0)
    return slope, (left / (number * power)).sqrt() + _OF_FEW * _bias(slope - 1, left / power) / _SIGNIFICANT


def _inputs(columns: Tensor, number: int) -> Iterator[Hint]:
    """Yield what no rounding of the weights of one input explains: they were scaled, and nothing undoes it."""
    slope, error = _slopes(columns[0], columns[1], columns[2], number)
    off = (slope - 1).abs()
    scaled = (off > MOST_SLOPE) & (off > _SIGNIFICANT * error)
    if number >= LEAST_GROUP and scaled.any():
        found = slope[scaled]
        text = f"{len(found)} of {len(slope)} inputs are {float(found.min()):.3g} to {float(found.max()):.3g} times"
        yield Hint("scale", text, 0.6, evidence="scaled inputs")


def _single(sums: MatrixSums) -> Iterator[Hint]:
    far, number = sums.num_far, sums.num_inside
    if far and far < 0.01 * number and sums.sample.numel() and float(sums.sample.quantile(0.99)) < _NEAREST:
        text = f"{far} of {number} elements are up to {sums.largest:.3g} steps away, all others rounded"
        yield Hint("other", text, 0.8, evidence="single elements")


def _whole(sums: MatrixSums) -> Iterator[Hint]:
    """Yield a factor, or a shift, of all of a weight or of whole rows that is small beside a step."""
    if sums.correlation < _RIGHT or not sums.noise:
        return
    rows = torch.cat(sums.rows, 1)
    every = rows.sum(1)
    (factor, beyond), (factors, each) = _factors(every), _factors(rows)
    off = each > _LEAST_OF_ROW
    root, text = math.sqrt(max(1, sums.num_quantized)), "times what it should be"
    moved, unbalanced = abs(sums.moved) / root / math.sqrt(sums.noise), abs(sums.total) / root / math.sqrt(every[0])
    if float(beyond) > _LEAST_OF_ALL or _is_scaled(sums):
        yield Hint("scale", f"all of it is {float(factor):.4g} {text}", 0.9, evidence="wrong scale")
    elif sums.columns.shape[1] >= LEAST_GROUP**2 and bool(off.any()):
        found, where = factors[off], f"{int(off.sum())} of {len(off)} rows"
        ends = f"{float(found.min()):.4g} to {float(found.max()):.4g}"
        yield Hint("scale", f"{where} are {ends} {text}", 0.9, evidence="wrong scale")
    elif moved > _SIGNIFICANT / root + _LEAST_SHIFT + _SHIFT_OF_MEAN * unbalanced:
        how = f"{sums.moved / root**2:+.3g}, {moved:.2g} of what rounding does"
        yield Hint("other", f"all of it is moved by {how}", 0.8, evidence="wrong zero")


def _factors(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors on the unquantized values, and how far each is beyond what quantizers make; below 0 it is not.

    Args:
        sums: [6, ...], as in `MatrixSums.rows`.
    """
    bb, bd, dd, squares, cubes, fourths = sums
    power = bb.clamp(min=1e-300)
    slope = bd / power
    left = (squares - 2 * slope * cubes + slope.square() * fourths).clamp(min=0)  # of b^2 and what the slope leaves
    beyond = slope.abs() - _bias(slope, dd / power - slope.square()) - _SIGNIFICANT * left.sqrt() / power
    return 1 + slope, torch.where(bb > 0, beyond, -1.0)


def _bias(slope: Tensor, noise: Tensor) -> Tensor:
    """Return how far quantizers grow or shrink what leaves them with so much noise, over its power."""
    return torch.where(slope > 0, _GROWN, _SHRUNK) * noise.clamp(min=0)


def _is_scaled(sums: MatrixSums) -> bool:
    """Whether elements not at an end have a factor that is large beside rounding: that of 8 bit floating numbers is."""
    bb, bc, rounding = (float(total) for total in sums.inside)
    enough = bb > 0 and sums.num_inside >= LEAST_GROUP**2
    return enough and abs(bc / bb - 1) > max(_LEAST_FACTOR, _OF_ROUNDING * math.sqrt(rounding / bb))


def _instead(b: Tensor, c: Tensor, other_weights: Mapping[str, Tensor], correlation: float) -> Hint | None:
    """Return what the values of a weight are instead of its own, if known."""
    rows, columns = (min(size, _SAMPLE) // 8 * 8 for size in b.shape)
    small_b, small_c = b[:rows, :columns].double(), c[:rows, :columns].double()
    for cause, order in _ORDERS:
        for axis, name in ((1, "inputs"), (0, "outputs")):
            index = torch.arange(small_c.shape[axis]).reshape(-1, 8)[:, list(order)].flatten()
            if index.numel() and _correlation(small_b, small_c.index_select(axis, index)) > _RIGHT:
                text = f"eight neighboring {name} are in the order {order}: {cause}"
                return Hint("permuted", text, 1.0, evidence="packing order")
    if b.shape[0] == b.shape[1] and _correlation(small_b, c.T[:rows, :columns].double()) > _RIGHT:
        return Hint("transposed", "it is the transposed weight", 1.0, evidence="transposed")
    if correlation < -_RIGHT:
        return Hint("scale", "it has the other sign", 1.0, evidence="sign")
    found = next((name for name, other in other_weights.items() if _is_same(other, c)), None)
    return None if found is None else Hint("swapped", f"it is the weight {found}", 1.0, evidence="another weight")


def _is_same(other: Tensor, c: Tensor) -> bool:
    rows = other.detach().reshape(-1, other.shape[-1])[:_SAMPLE, :_SAMPLE].double()
    return _correlation(rows, c[:_SAMPLE, :_SAMPLE].double()) > _RIGHT


def _correlation(a: Tensor, b: Tensor) -> float:
    product = float((a * b).sum())
    size = math.sqrt(float(a.square().sum()) * float(b.square().sum()))
    return product / size if size > 0 else float(torch.equal(a, b))


MOST_ELEMENT = 1.5
"""Steps beyond which an element that is not at an end counts as far away."""
LEAST_GROUP = 16
"""Minimum number of elements of a meaningful mean."""
_SPARSE = 17
"""One of so many errors is kept, to see how they are distributed; of any place in a group."""


class MatrixSums:
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
