"""Means of squares by slice, against torch's own."""

from __future__ import annotations

import pytest
import torch

from glassengine.numerics import floor as module
from glassengine.numerics.floor import Counted, error_means, measured_floor, quick_floor


@pytest.mark.parametrize(
    ("shape", "block"),
    [*((s, n) for s in [(5,), (2, 3), (2, 3, 4), (2, 1, 3, 4)] for n in (1, 1 << 15)), ((), 1), ((0, 3), 1)],
)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_means_are_those_of_the_elements_that_count(
    shape: tuple[int, ...], number: int, block: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    generator = torch.Generator().manual_seed(1)
    exact = torch.rand(shape[::-1], generator=generator, dtype=torch.float64).permute(list(range(len(shape)))[::-1])
    runs = [exact + torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(number)]
    squares = [exact.square(), *((run - exact).square() for run in runs)]
    mask = torch.rand(shape, generator=generator) > 0.5 if masked else None
    weights = torch.ones(shape, dtype=torch.float64) if mask is None else mask.double()
    found = error_means(exact, runs, Counted(mask), power=True)
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


@pytest.mark.parametrize(("block", "small"), [(3, 1), (1 << 15, 1), (1 << 15, 1 << 12)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_quick_floor_is_that_without_slices(
    block: int, small: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    monkeypatch.setattr(module, "_SMALL", small)
    generator = torch.Generator().manual_seed(1)
    exact = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    runs = [exact.float(), exact + 1e-6 * torch.rand(4, 5, generator=generator)]
    mask = torch.rand(4, 5, generator=generator) > 0.5 if masked else None
    whole = measured_floor(exact, runs, mask, hidden=None, dtype=torch.float32, relative=1e-9)
    quick = quick_floor(exact, runs, mask, torch.float32, 1e-9)
    assert quick is not None
    for name in ("least", "relative", "native"):
        assert getattr(quick, name) == pytest.approx(getattr(whole, name))
    assert quick.largest >= float((exact if mask is None else exact[mask]).max())
    exact[0, 0] = -torch.inf
    assert mask is not None or quick_floor(exact, runs, mask, torch.float32, 1e-9) is None
