"""The sums that ranks make of their terms, each judged by a bound of its own, whatever made the terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glassengine.numerics.judgement import smallest_precise, unit_roundoff


@dataclass(frozen=True)
class Collective:
    """An all-reduce in a step.

    Attributes:
        node: Of the baseline's program: whose terms these are.
        name: Of the candidate's node.
        first_rank: Process of the first term; the others follow.
        terms: What each rank gave.
        results: What each rank got.
    """

    node: str
    name: str
    first_rank: int
    terms: Sequence[Tensor]
    results: Sequence[Tensor]

    def bound_ratios(self) -> list[float]:
        """Return, of each rank, the worst error over the bound of a sum of so many terms, added up in any order.

        Each of n - 1 additions rounds a partial sum, which is at most the sum of the terms' sizes.
        """
        dtype, count = self.terms[0].dtype, len(self.terms)
        if not dtype.is_floating_point:
            total = torch.stack(list(self.terms)).sum(0).to(dtype)
            return [0.0 if torch.equal(result, total) else torch.inf for result in self.results]
        terms = torch.stack([term.double() for term in self.terms])
        total, u = terms.sum(0), unit_roundoff(dtype) * (count - 1)
        allowed = u / (1 - u) * terms.abs().sum(0) + count * smallest_precise(dtype)
        return [_worst(result.double(), total, allowed) for result in self.results]


def _worst(result: Tensor, total: Tensor, allowed: Tensor) -> float:
    if result.shape != total.shape:
        return torch.inf
    counts = total.isfinite()  # what comes of NaN is the fault of the term that has it
    ratio = torch.where(counts, (result - total).abs() / allowed, 0.0).nan_to_num(torch.inf, posinf=torch.inf)
    return float(ratio.max()) if ratio.numel() else 0.0
