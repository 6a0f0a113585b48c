"""Figures and summaries against plain numpy formulas, and the tolerances against torch.testing."""

import math

import numpy as np
import pytest
import torch

from glassengine.blocks.arrays import error_stream_of, statistics_of
from glassengine.numerics.measure import measure
from glassengine.numerics.tolerance import EXACT, is_inexact, tolerance
from glassengine.recording.layout.statistics import summarize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_figures_are_the_plain_formulas(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    b = (torch.randn(70, 1000, generator=g) * 100).to(dtype)
    c = (b + torch.randn(70, 1000, generator=g)).to(dtype)
    b[3] = 0
    got = measure(b, c, rtol=1e-3, atol=1e-2)
    x, y = b.double().numpy(), c.double().numpy()
    error = np.abs(y - x)
    rel = 1e-6 if dtype.is_floating_point and dtype != torch.float64 else 1e-12
    assert got.num_elements == 70_000
    assert got.num_different == (x != y).sum()
    assert got.max_abs_diff == error.max()
    assert got.mean_abs_diff == pytest.approx(error.mean(), rel=rel)
    assert got.rms_diff == pytest.approx(np.sqrt((error**2).mean()), rel=rel)
    assert got.max_rel_diff == pytest.approx((error[x != 0] / np.abs(x[x != 0])).max(), rel=rel)
    assert got.mean_rel_diff == pytest.approx((error[x != 0] / np.abs(x[x != 0])).mean(), rel=rel)
    cosine = (x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum())
    assert got.cosine_similarity == pytest.approx(cosine, rel=rel)
    assert got.snr_db == pytest.approx(10 * np.log10((x**2).sum() / (error**2).sum()), rel=rel)
    assert got.worst_index is not None
    assert error[got.worst_index] == error.max()
    assert (got.baseline_at_worst, got.candidate_at_worst) == (x[got.worst_index], y[got.worst_index])
    assert got.num_beyond_tolerance == (error > 1e-2 + 1e-3 * np.abs(x)).sum()
    assert not got.allclose


def test_the_edges_are_defined() -> None:
    empty = measure(torch.empty(0, 3), torch.empty(0, 3), rtol=0, atol=0)
    assert (empty.cosine_similarity, empty.snr_db, empty.worst_index, empty.allclose) == (1.0, math.inf, None, True)
    same = measure(torch.tensor(2.0), torch.tensor(2.0), rtol=0, atol=0)
    assert (same.cosine_similarity, same.snr_db, same.num_different) == (1.0, math.inf, 0)
    scalar = measure(torch.tensor(2.0), torch.tensor(3.0), rtol=0, atol=0)
    assert (scalar.worst_index, scalar.max_rel_diff) == ((), 0.5)
    zeros = measure(torch.zeros(2), torch.ones(2), rtol=0, atol=0)
    assert (zeros.cosine_similarity, zeros.snr_db, zeros.max_rel_diff) == (0.0, -math.inf, 0.0)
    both_zero = measure(torch.zeros(2), -torch.zeros(2), rtol=0, atol=0)
    assert (both_zero.cosine_similarity, both_zero.num_different) == (1.0, 0)
    opposite = measure(torch.ones(2), -torch.ones(2), rtol=0, atol=0)
    assert opposite.cosine_similarity == pytest.approx(-1.0, abs=1e-15)
    with pytest.raises(ValueError, match="shapes differ"):
        measure(torch.ones(2), torch.ones(3), rtol=0, atol=0)


def test_non_finite_values() -> None:
    b = torch.tensor([math.nan, math.inf, 1.0, 2.0])
    assert measure(b, b.clone(), rtol=0, atol=0).num_different == 0
    c = torch.tensor([math.nan, -math.inf, 1.0, 2.5])
    got = measure(b, c, rtol=0, atol=10.0)
    assert (got.num_nonfinite_mismatch, got.worst_index, got.max_abs_diff) == (1, (1,), math.inf)
    assert (got.mean_abs_diff, got.num_beyond_tolerance) == (0.25, 1)


def test_summary() -> None:
    x = torch.randn(300, 400, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0], x[0, 1], x[0, 2] = math.nan, math.inf, -math.inf
    got = summarize(x)
    finite = x.double()[x.isfinite()]
    assert (got.shape, got.dtype, got.num_elements, got.num_nan, got.num_inf) == ((300, 400), "bfloat16", 120_000, 1, 2)
    assert (got.min, got.max, got.median) == (float(finite.min()), float(finite.max()), float(finite.median()))
    assert got.mean == pytest.approx(float(finite.mean()), rel=1e-10)
    assert got.std == pytest.approx(float(finite.std()), rel=1e-10)
    assert summarize(torch.tensor(3.0)).std == 0.0
    nothing = summarize(torch.tensor([math.nan]))
    assert (nothing.min, nothing.median, nothing.std, nothing.num_nan) == (None, None, None, 1)
    assert summarize(torch.empty(0)).mean is None
    assert summarize(torch.tensor([3 + 4j])).max == 5.0
    assert summarize(torch.tensor([True, False, False])).mean == pytest.approx(1 / 3)


def test_summaries_of_errors() -> None:
    sides = np.array([2.0, 0.0, 4.0]), np.array([1.0, 3.0, 4.0])
    absolute, relative = (statistics_of(error_stream_of(*sides, relative=each)) for each in (False, True))
    assert (absolute.max, absolute.median, absolute.num_elements) == (3.0, 1.0, 3)
    assert (relative.max, relative.num_elements) == (0.5, 2)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"])
def test_tolerances_are_those_of_torch(dtype: str) -> None:
    assert tuple(tolerance(dtype, dtype)) == torch.testing._comparison.default_tolerances(getattr(torch, dtype))


def test_mixed_and_exact_tolerances() -> None:
    assert tolerance("float32", "bfloat16") == (1.6e-2, 1e-5)
    assert tolerance("float64", "int64") == (1e-7, 1e-7)
    assert tolerance("int64", "bool") == EXACT
    assert tolerance("int64", "int64", rtol=1.0, atol=1.0) == EXACT
    assert tolerance("float32", "float32", rtol=0.5) == (0.5, 1e-5)
    assert tolerance("float8_e4m3fn", "float32").rtol == torch.finfo(torch.float8_e4m3fn).eps
    assert is_inexact("complex64")
    assert not is_inexact("bool")


def test_a_huge_tensor_of_one_value_needs_no_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassengine.blocks.arrays.lower_median_of", None)
    assert summarize(torch.full((100_000,), 2.5)).median == 2.5
