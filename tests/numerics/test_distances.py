"""Distances in ulp, histograms, slices and patterns: planted differences are found, everything odd is defined."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassengine.blocks import pieces
from glassengine.blocks.arrays import error_stream_of, statistics_of
from glassengine.numerics import distances
from glassengine.numerics.distances import (
    measure,
    slice_maxima,
    tensor_hints,
    tensor_values,
    ulp_distance,
    worst_elements,
)
from glassengine.numerics.tolerance import EXACT, is_inexact, tolerance
from glassengine.recording.layout.tensors import summarize
from glassengine.results import ElementDifference

FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(params=[64, 1 << 16], ids=["many pieces", "one piece"], autouse=True)
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "BLOCK_ELEMENTS", request.param)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 2), min_size=1, max_size=20))
def test_ulp_are_steps_of_nextafter(values: list[tuple[float, float]]) -> None:
    b, c = (torch.tensor([pair[side] for pair in values], dtype=torch.float32) for side in (0, 1))
    got = ulp_distance(b, c)
    keys = [np.array([pair[side] for pair in values], np.float32).view(np.int32).astype(object) for side in (0, 1)]
    steps = [abs(x - y) for x, y in zip(*([k if k >= 0 else -(k + 2**31) for k in side] for side in keys), strict=True)]
    assert (got.max_ulp, got.num_finite) == (max(steps), len(values))
    assert got.worst_index == ((steps.index(max(steps)),) if max(steps) else None)
    assert sum(got.histogram) == len(values)
    for k, count in enumerate(got.histogram):
        assert count == sum(step.bit_length() == k for step in steps)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_neighbors_are_one_apart_in_every_dtype(dtype: torch.dtype) -> None:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    b = torch.linspace(0.25, 2, 200, dtype=torch.float64).to(dtype)
    for sign in (1, -1):
        c = (b.view(bits) + 1).view(dtype).double() * sign
        got = ulp_distance((b.double() * sign).to(dtype), c.to(dtype))
        assert (got.max_ulp, got.histogram) == (1, (0, 200))
    planted = b.clone()
    planted[77] = (b.view(bits)[77] + 5).view(dtype)
    assert ulp_distance(b, planted).worst_index == (77,)
    assert ulp_distance(b, planted).histogram == (199, 0, 0, 1)


def test_ulp_of_powers_of_two_without_a_sign() -> None:
    b = torch.tensor([0.5, 1.0, 4.0])
    got = ulp_distance(b.to(torch.float8_e8m0fnu), (b * 4).to(torch.float8_e8m0fnu))
    assert (got.max_ulp, got.histogram) == (2, (0, 0, 3))


def test_ulp_across_zero_and_at_the_ends() -> None:
    tiny = torch.tensor([5e-324], dtype=torch.float64)
    assert ulp_distance(tiny, -tiny).max_ulp == 2
    assert ulp_distance(torch.tensor([0.0]), torch.tensor([-0.0])).histogram == (1,)
    top = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    got = ulp_distance(top, -top)
    assert got.max_ulp == 2 * 0x7FEFFFFFFFFFFFFF
    assert got.histogram == (*[0] * 64, 1)


def test_ulp_of_what_is_not_finite_empty_or_not_floating() -> None:
    b = torch.tensor([[math.nan, math.inf, 1.0, math.nan]])
    got = ulp_distance(b, torch.tensor([[math.nan, -math.inf, 1.0, 2.0]]))
    assert (got.num_finite, got.num_nonfinite_mismatch, got.max_ulp, got.worst_index) == (1, 2, 0, None)
    assert ulp_distance(b[:, :1], b[:, :1]).max_ulp is None
    empty = ulp_distance(torch.empty(0, 3), torch.empty(0, 3))
    assert (empty.max_ulp, empty.histogram) == (None, ())
    for other in (torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.bool), torch.zeros(3).half()):
        with pytest.raises(ValueError, match="one floating dtype"):
            ulp_distance(torch.zeros(3), other)
    with pytest.raises(ValueError, match="one floating dtype"):
        ulp_distance(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="shapes differ"):
        ulp_distance(torch.zeros(3), torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_maxima_of_every_slice(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    b = (torch.randn(3, 17, 11, generator=g) * 50).to(dtype)
    c = (torch.randn(11, 17, 3, generator=g) * 50).to(torch.float64).permute(2, 1, 0)
    error = np.abs(c.numpy() - b.double().numpy())
    got = slice_maxima(b, c)
    assert [(found.axis, found.size, found.step) for found in got] == [(0, 3, 1), (1, 17, 1), (2, 11, 1)]
    for axis, found in enumerate(got):
        others = tuple(i for i in range(3) if i != axis)
        assert found.maxima == tuple(error.max(axis=others).tolist())
        assert found.worst_index == int(np.unravel_index(error.argmax(), error.shape)[axis])


def test_a_planted_channel_stands_out() -> None:
    b = torch.zeros(4, 30, 8)
    c = b.clone()
    c[:, :, 5] += 1
    c[2, 7, 3] = math.nan
    batch, token, channel = slice_maxima(b, c)
    assert channel.maxima == (0, 0, 0, math.inf, 0, 1, 0, 0)
    assert (batch.worst_index, token.worst_index, channel.worst_index) == (2, 7, 3)
    assert json.dumps(channel.to_dict())


def test_slices_of_nothing_of_scalars_and_of_long_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slice_maxima(torch.tensor(1.0), torch.tensor(2.0)) == ()
    rows, columns = slice_maxima(torch.empty(0, 3), torch.empty(0, 3))
    assert (rows.maxima, rows.worst_index, columns.maxima) == ((), None, (0, 0, 0))
    assert slice_maxima(torch.tensor([True, True]), torch.tensor([True, False]))[0].maxima == (0, 1)
    monkeypatch.setattr(distances, "_MAX_SLICES", 100)
    c = torch.zeros(1001)
    c[777] = 2
    (found,) = slice_maxima(torch.zeros(1001), c)
    assert (found.step, len(found.maxima), found.worst_index) == (11, 91, 770)
    with pytest.raises(ValueError, match="shapes differ"):
        slice_maxima(torch.zeros(2), torch.zeros(3))


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


@pytest.fixture
def baseline() -> torch.Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def kinds(baseline: torch.Tensor, candidate: torch.Tensor) -> list[str]:
    return [hint.kind for hint in tensor_hints(baseline, candidate.float(), None)]


def test_scale_sign_and_offset(baseline: torch.Tensor) -> None:
    assert kinds(baseline, baseline * 1.25) == ["scale"]
    assert kinds(baseline, -baseline) == ["scale"]
    assert "other" in kinds(baseline, baseline + 0.5)


def test_one_slice(baseline: torch.Tensor) -> None:
    candidate = baseline.clone()
    candidate[:, 4] += torch.randn(2, 8)
    hints = tensor_hints(baseline, candidate.float(), None)
    assert [(hint.kind, "index 4 of axis 1" in hint.text) for hint in hints] == [("other", True)]


def test_no_guess_for_random_errors_or_invalid_elements(baseline: torch.Tensor) -> None:
    assert kinds(baseline, baseline + torch.randn(2, 6, 8)) == []
    valid = torch.zeros(2, 6, 8, dtype=torch.bool)
    assert tensor_hints(baseline, (baseline * 2).float(), valid) == []
