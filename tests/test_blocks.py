"""The block kernel against plain numpy formulas in float64, for every kind of tensor."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassengine.blocks import arrays, blocks, difference, pieces
from glassengine.blocks.arrays import error_stream_of, lower_median_of, statistics_of, stream_of

REAL = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,
]  # fmt: skip


def sample(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 5
    if dtype == torch.bool:
        return values > 0
    if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
        values = values.abs()
    return values.to(dtype)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4),
        torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
        torch.arange(3.0).expand(5, 3),
        torch.tensor(3.0),
        torch.arange(40.0)[::3],
    ],
    ids=["contiguous", "transposed", "expanded", "scalar", "strided"],
)
@pytest.mark.parametrize("size", [1, 5, 7, 1000])
def test_blocks_cover_in_row_major_order(tensor: torch.Tensor, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "BLOCK_ELEMENTS", size)
    position = 0
    parts = []
    for start, (piece,) in blocks(tensor):
        assert start == position
        assert piece.numel() <= size
        position += piece.numel()
        parts.append(piece)
    assert torch.equal(torch.cat(parts), tensor.reshape(-1))


@pytest.mark.parametrize("tensor", [torch.ones(4)[1::8], torch.ones(2, 4)[:1, 1::8].t()])
def test_a_single_element_of_any_stride(tensor: torch.Tensor) -> None:
    assert difference(tensor, tensor + 1, rtol=0, atol=0).num_different == 1
    assert difference(tensor, tensor, rtol=0, atol=0).num_different == 0


def test_empty_tensor_has_no_blocks() -> None:
    assert list(blocks(torch.empty(3, 0, 2))) == []
    assert list(blocks(torch.empty(3, 0, 2).transpose(0, 2))) == []


def test_a_huge_expanded_tensor_is_never_materialized() -> None:
    huge = torch.zeros(1).expand(1 << 40)
    start, (piece,) = next(blocks(huge))
    assert (start, piece.numel()) == (0, pieces.BLOCK_ELEMENTS)


@pytest.mark.parametrize("candidate_dtype", REAL, ids=str)
@pytest.mark.parametrize("baseline_dtype", REAL, ids=str)
def test_difference_of_every_dtype_pair(baseline_dtype: torch.dtype, candidate_dtype: torch.dtype) -> None:
    b, c = sample(baseline_dtype, (7, 5), 0), sample(candidate_dtype, (7, 5), 1)
    got = difference(b, c, rtol=0.1, atol=0.5)
    x, y = b.to(torch.float64).numpy(), c.to(torch.float64).numpy()
    error = np.abs(y - x)
    assert got.num_different == np.count_nonzero(error)
    assert got.sum_abs == pytest.approx(error.sum())
    assert got.sum_squares == pytest.approx((error**2).sum())
    assert got.max_abs == error.max()
    assert got.num_beyond == np.count_nonzero(error > 0.5 + 0.1 * np.abs(x))
    assert got.max_rel == pytest.approx((error[x != 0] / np.abs(x[x != 0])).max())
    assert got.dot == pytest.approx((x * y).sum())


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.tuples(*[st.floats(width=32) | st.sampled_from([0.0, math.nan, math.inf, -math.inf])] * 2), max_size=40
    )
)
def test_difference_with_anything_in_it(values: list[tuple[float, float]]) -> None:
    b = torch.tensor([pair[0] for pair in values], dtype=torch.float32)
    c = torch.tensor([pair[1] for pair in values], dtype=torch.float32)
    got = difference(b, c, rtol=1e-3, atol=1e-5)
    x, y = b.double().numpy(), c.double().numpy()
    agree = (x == y) | (np.isnan(x) & np.isnan(y))
    both = np.isfinite(x) & np.isfinite(y)
    error = np.abs(y[both] - x[both])
    assert got.num_elements == len(values)
    assert got.num_finite == both.sum()
    assert got.num_mismatched == (~both & ~agree).sum()
    assert got.num_different == (~agree).sum()
    assert got.num_beyond == (error > 1e-5 + 1e-3 * np.abs(x[both])).sum() + got.num_mismatched
    assert got.sum_abs == pytest.approx(error.sum(), rel=1e-12)
    assert (got.worst is None) == bool(agree.all())
    if got.num_mismatched:
        assert got.worst == np.flatnonzero(~both & ~agree)[0]
    elif got.worst is not None:
        assert abs(y[got.worst] - x[got.worst]) == error.max()


@pytest.mark.parametrize("position", [0, pieces.BLOCK_ELEMENTS - 1, pieces.BLOCK_ELEMENTS, 150_000, 199_999])
def test_a_planted_difference_is_found_in_any_block(position: int) -> None:
    b = torch.randn(200_000)
    c = b.clone()
    c[position] += 3
    got = difference(b, c, rtol=0, atol=0)
    assert (got.worst, got.num_different, got.num_beyond) == (position, 1, 1)
    assert got.baseline_at_worst == float(b[position])
    assert got.candidate_at_worst == float(c[position])
    c[min(position + 5, 199_999)] = math.nan
    assert difference(b, c, rtol=0, atol=0).worst == min(position + 5, 199_999)


def test_position_is_row_major_whatever_the_strides() -> None:
    b = torch.zeros(300, 400).t()
    c = torch.zeros(400, 300)
    c[390, 17] = 1
    assert difference(b, c, rtol=0, atol=0).worst == 390 * 300 + 17


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_neighboring_large_integers_differ(dtype: torch.dtype) -> None:
    b = torch.tensor([2**62 + 1, 5, 2**53], dtype=dtype)
    c = torch.tensor([2**62, 5, 2**53 + 1], dtype=dtype)
    got = difference(b, c, rtol=0, atol=0)
    assert (got.num_different, got.num_beyond, got.max_abs) == (2, 2, 1.0)


def test_extreme_integers() -> None:
    b = torch.tensor([-(2**63), 2**63 - 1])
    c = torch.tensor([2**63 - 1, -(2**63)])
    assert difference(b, c, rtol=0, atol=0).max_abs == 2.0**64
    top = torch.tensor([2**63], dtype=torch.uint64)
    assert difference(top, torch.tensor([2**63 - 1]), rtol=0, atol=0).max_abs == 1.0


def test_complex() -> None:
    b = torch.tensor([1 + 1j, 2j, complex(math.nan, 1), complex(math.inf, 0)], dtype=torch.complex64)
    c = torch.tensor([1 + 4j, 2j, complex(math.nan, 1), complex(0, math.inf)], dtype=torch.complex64)
    got = difference(b, c, rtol=0, atol=0)
    assert (got.num_different, got.num_mismatched, got.max_abs) == (2, 1, 3.0)
    assert got.dot == pytest.approx(float(torch.vdot(b[:2], c[:2]).real))
    mixed = difference(torch.tensor([1.0]), torch.tensor([1 + 2j]), rtol=0, atol=0)
    assert (mixed.max_abs, mixed.worst) == (2.0, 0)
    assert difference(b.conj(), c.conj(), rtol=0, atol=0).max_abs == 3.0


def test_huge_float64_values_do_not_hide_a_difference() -> None:
    b = torch.tensor([1e308, 1.0], dtype=torch.float64)
    got = difference(b, -b, rtol=0, atol=0)
    assert (got.max_abs, got.num_different, got.num_mismatched) == (math.inf, 2, 0)


def test_tensor_that_requires_grad() -> None:
    b = torch.ones(3, requires_grad=True)
    assert difference(b, b * 2, rtol=0, atol=0).max_abs == 1.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32) | st.sampled_from([math.nan, math.inf]), max_size=50))
def test_moments_and_median(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    got = statistics_of(stream_of(x.numpy()))
    finite = x.double().numpy()[np.isfinite(x.numpy())]
    assert (got.num_elements, got.num_nan, got.num_inf) == (
        len(values),
        np.isnan(x.numpy()).sum(),
        np.isinf(x.numpy()).sum(),
    )
    if finite.size:
        assert (got.min, got.max) == (finite.min(), finite.max())
        assert got.mean == pytest.approx(finite.mean(), rel=1e-9, abs=abs(finite).max() * 1e-12)
        assert got.std is not None
        m2 = ((finite - finite.mean()) ** 2).sum()
        assert got.std**2 * max(finite.size - 1, 1) == pytest.approx(m2, rel=1e-6, abs=1e-12 * (finite**2).sum())
        assert got.median == float(torch.from_numpy(finite).median())


@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "wide", "negative", "integers"])
def test_a_median_between_elements_of_a_sample_is_exact(kind: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "SELECT_ELEMENTS", limit)
    g = torch.Generator().manual_seed(0)
    x = {
        "normal": torch.randn(100_001, generator=g),
        "ties": torch.randint(-2, 3, (100_000,), generator=g).float(),
        "constant": torch.full((100_000,), -1.5),
        "wide": torch.randn(70_000, generator=g, dtype=torch.float64) ** 51,
        "negative": -torch.rand(70_001, generator=g, dtype=torch.float64),
        "integers": torch.randint(-(2**40), 2**40, (70_000,), generator=g),
    }[kind]
    median = float(x.double().median())
    assert lower_median_of(stream_of(x.numpy()), x.numel()) == statistics_of(stream_of(x.numpy())).median == median


def test_a_large_offset_does_not_cancel() -> None:
    x = torch.randn(200_000, dtype=torch.float64) + 1e9
    got = statistics_of(stream_of(x.numpy()))
    assert got.std == pytest.approx(float(x.numpy().std(ddof=1)), rel=1e-6)


def test_error_streams() -> None:
    b = np.array([2.0, 0.0, math.inf, math.nan, 1.0])
    c = np.array([1.0, 3.0, math.inf, math.nan, math.nan])
    (absolute,), (relative,) = (error_stream_of(b, c, relative=each)() for each in (False, True))
    assert absolute.tolist()[:4] == [1.0, 3.0, 0.0, 0.0]
    assert relative[0] == 0.5
    assert len(relative) == 4
    assert math.isnan(relative[-1])
    large = np.array([2**60, 2**60 + 1])
    (absolute,) = error_stream_of(large, large[::-1], relative=False)()
    assert absolute.tolist() == [1.0, 1.0]


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    difference(torch.ones(3), torch.zeros(3), rtol=0, atol=0)
    with pytest.raises(ValueError, match="shapes differ"):
        difference(torch.ones(3), torch.zeros(4), rtol=0, atol=0)
    assert torch.get_num_threads() == before
