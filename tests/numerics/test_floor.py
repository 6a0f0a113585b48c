"""Means of squares by slice, against torch's own."""

from __future__ import annotations

import pytest
import torch

from glassengine.numerics import floor as module
from glassengine.numerics.floor import Counted, slice_means


@pytest.mark.parametrize(
    ("shape", "small"),
    [*((s, n) for s in [(5,), (2, 3), (2, 3, 4), (2, 1, 3, 4)] for n in (0, 1 << 16)), ((), 1), ((0, 3), 1)],
)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_means_are_those_of_the_elements_that_count(
    shape: tuple[int, ...], number: int, small: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SMALL", small)
    generator = torch.Generator().manual_seed(1)
    squares = [torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(number)]
    mask = torch.rand(shape, generator=generator) > 0.5 if masked else None
    weights = torch.ones(shape, dtype=torch.float64) if mask is None else mask.double()
    found = slice_means(squares, Counted(mask))
    for at, square in enumerate(squares):
        whole = (square * weights).sum()
        assert found.totals[at] == pytest.approx(float(whole))
        assert found.means[at] == pytest.approx(float(whole / weights.sum().clamp(min=1)))
        assert len(found.by_axis) == square.dim()
        for axis, all_means in enumerate(found.by_axis):
            means = all_means[at]
            others = [i for i in range(square.dim()) if i != axis]
            kept = [(square * weights), weights]
            total, count = (one.sum(others) if others else one for one in kept)
            torch.testing.assert_close(means, total / count.clamp(min=1))
