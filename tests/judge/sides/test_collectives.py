"""A sum of the terms of ranks is held to the bound of one: in any order, and no further."""

from __future__ import annotations

import itertools

import pytest
import torch

from glassengine.judge.sides.collectives import Collective


def ratios(terms: list[torch.Tensor], *results: torch.Tensor) -> list[float]:
    return Collective("node", "name", 0, terms, results).bound_ratios()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 5])
def test_any_order_is_within_the_bound_and_a_mistake_is_not(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(500, generator=generator).to(dtype) for _ in range(count)]
    for order in list(itertools.permutations(range(count)))[::7]:
        total = terms[order[0]].clone()
        for place in order[1:]:
            total += terms[place]
        assert 0 < ratios(terms, total)[0] <= 1
    right = torch.stack(terms).sum(0)
    for wrong in (right / count, right + terms[0], right - terms[-1], terms[0]):
        found = ratios(terms, right, wrong)
        assert found[0] <= 1 < found[1]


def test_what_is_no_number_or_whole() -> None:
    terms = [torch.tensor([1.0, torch.nan, 0.0]), torch.tensor([2.0, 1.0, 0.0])]
    assert ratios(terms, torch.tensor([3.0, torch.nan, 0.0])) == [0.0]
    assert ratios(terms, torch.tensor([torch.nan, 0.0, 0.0])) == [torch.inf]
    assert ratios(terms, torch.zeros(2)) == [torch.inf]
    whole = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    assert ratios(whole, torch.tensor([4, 6]), torch.tensor([4, 7])) == [0.0, torch.inf]
