from __future__ import annotations

import math

import pytest
import torch

from glassengine.numerics.metrics.elements import tensor_values, worst_elements
from glassengine.results import ElementDifference


def told(found: tuple[ElementDifference, ...]) -> list[tuple[tuple[int, ...], float, float]]:
    return [(one.index, one.baseline, one.candidate) for one in found]


def test_the_worst_elements_come_with_both_values() -> None:
    x = torch.zeros(2, 3, 4)
    y = x.clone()
    y[1, 2, 3], y[0, 1, 0], y[0, 0, 0] = 5.0, -7.0, math.nan
    x[1, 0, 0] = y[1, 0, 0] = math.nan
    found = told(worst_elements(x, y))
    assert [one[0] for one in found] == [(0, 0, 0), (0, 1, 0), (1, 2, 3)] and found[1][1:] == (0.0, -7.0)
    assert told(worst_elements(torch.tensor(1), torch.tensor(3))) == [((), 1, 3)]
    assert worst_elements(torch.ones(0), torch.ones(0)) == ()
    assert told(worst_elements(torch.tensor([True]), torch.tensor([False]))) == [((0,), 1, 0)]
    assert told(worst_elements(torch.tensor([1j]), torch.tensor([2j]))) == [((0,), 1, 2)]
    # Of many that are as large, the first twelve.
    assert [one.index for one in worst_elements(torch.zeros(99), torch.ones(99))] == [(n,) for n in range(12)]
    assert worst_elements(torch.tensor([math.inf, -0.0]), torch.tensor([math.inf, 0.0])) == ()


def test_an_axis_shows_the_head_that_is_wrong() -> None:
    x = torch.randn(2, 4, 600, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[:, 3] += 1e-3
    found = tensor_values(x, y)
    heads = found.axes[1].maxima
    assert heads[:3] == (0.0, 0.0, 0.0) and heads[3] > 9e-4
    assert found.axes[2].step == 3 and len(found.axes[2].maxima) == 200
    assert found.ulp is not None and found.ulp.histogram[0] == 3600
    assert tensor_values(x, y.double()).ulp is None
    with pytest.raises(ValueError, match="shape"):
        tensor_values(x, y[0])
