"""Light statistics of single tensors against their definition, at the sizes where the way they are taken changes."""

from __future__ import annotations

import pytest
import torch

from glassengine.recording.layout.statistics import light

SIZES = [0, 1, 2, 100, 8191, 8193, 1 << 17, (1 << 17) + 1, 400_001]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_light_statistics_are_those_of_float64(size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)
    # The extremes in the last element and the one before: none may be forgotten.
    x[-2:] = torch.tensor([-1000.0, 2000.0])[-size:].to(dtype) if size else x[-2:]
    found, wide = light(x), x.double()
    assert found.num_nonfinite == 0
    assert (found.min, found.max) == ((float(wide.min()), float(wide.max())) if size else (None, None))
    assert found.norm == pytest.approx(float(wide.norm()), rel=1e-3 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("size", [size for size in SIZES if size > 2])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_counted_and_left_out(size: int, value: float) -> None:
    x = torch.arange(size, dtype=torch.float32)
    x[-1] = x[0] = value
    found, rest = light(x), x[1:-1].double()
    assert (found.min, found.max, found.num_nonfinite) == (float(rest.min()), float(rest.max()), 2)
    assert found.norm == pytest.approx(float(rest.norm()), rel=1e-5)


def test_squares_that_are_too_large_for_the_dtype() -> None:
    found = light(torch.full((20_000,), 3e38))
    assert found.norm == pytest.approx(3e38 * 20_000**0.5) and found.num_nonfinite == 0
