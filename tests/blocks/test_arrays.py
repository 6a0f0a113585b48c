"""The fast arithmetic against the definition in torch and float64, over what could tell them apart."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassengine.blocks import RawDifference, difference, paths, pieces
from glassengine.blocks.paths import arithmetic_for
from glassengine.blocks.pieces import Totals
from tests import children

FLOATING = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]


@pytest.fixture(scope="module", params=["plain", "compiled"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "compiled":
        pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "COMPILED_FROM", 0 if request.param == "compiled" else 1 << 62)
        yield request.param


def by_definition(b: torch.Tensor, c: torch.Tensor, rtol: float, atol: float) -> RawDifference:
    totals = Totals()
    totals.add(0, b.contiguous().reshape(-1), c.contiguous().reshape(-1), rtol, atol)
    return RawDifference(b.numel(), **vars(totals))


def check(b: torch.Tensor, c: torch.Tensor, rtol: float, atol: float) -> None:
    got, want = difference(b, c, rtol=rtol, atol=atol), by_definition(b, c, rtol, atol)
    for name in ("num_elements", "num_finite", "num_different", "num_mismatched", "num_beyond", "num_nonzero"):
        assert getattr(got, name) == getattr(want, name), name
    assert got.max_abs == want.max_abs
    assert got.worst == want.worst
    assert str(got.baseline_at_worst) == str(want.baseline_at_worst)
    assert str(got.candidate_at_worst) == str(want.candidate_at_worst)
    for name in ("sum_abs", "sum_squares", "sum_rel", "max_rel", "baseline_squares", "candidate_squares"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-6, abs=0), name
    # The squares of float64 numbers leave its range as well; what is left then is not asked for.
    norms = math.sqrt(want.baseline_squares) * math.sqrt(want.candidate_squares)
    if math.isfinite(norms):
        assert abs(got.dot - want.dot) <= 1e-6 * norms


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of 256 to 3000 elements: any magnitudes, near or far, with anything odd planted in either."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    n = draw(st.integers(256, 3000))

    def randn() -> torch.Tensor:
        return torch.randn(n, generator=g, dtype=torch.float64)

    spread = draw(st.sampled_from([0.0, 1.0, 8.0]))
    b = randn() * 10.0 ** (draw(st.integers(-44, 38)) + spread * torch.rand(n, generator=g, dtype=torch.float64))
    b = {"normal": b, "constant": b[:1].expand(n), "levels": b.sign() * b.abs().max() * randn().abs().ceil()}[
        draw(st.sampled_from(["normal", "normal", "constant", "levels"]))
    ].contiguous()
    kind = draw(st.sampled_from(["near", "near", "same", "negated", "other", "offset", "small", "one"]))
    c = {
        "near": lambda: b * (1 + 10.0 ** draw(st.integers(-8, -1)) * randn()),
        "same": b.clone,
        "negated": b.neg,
        "other": lambda: randn() * b.abs().mean(),
        "offset": lambda: b + b.abs().max() * 10.0 ** draw(st.integers(-9, 0)),
        "small": lambda: b * 10.0 ** draw(st.integers(-20, -1)),
        "one": lambda: torch.where(torch.arange(n) == n // 3, b * 1.5, b),
    }[kind]()
    dtypes = st.sampled_from(FLOATING[:3] * 3 + FLOATING + INTEGERS)
    first = draw(dtypes)
    kinds = (first, draw(st.sampled_from([first]) | dtypes))
    odd = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-40, 3e38, 1e-38, 65504.0])
    for value in draw(st.lists(odd, max_size=4)):
        where = torch.rand(n, generator=g) < draw(st.sampled_from([0.001, 0.3, 1.0]))
        for tensor, kind in zip((b, c), kinds, strict=True):
            if kind.is_floating_point and draw(st.booleans()):
                tensor[where] = value
    return b.to(kinds[0]), c.to(kinds[1])


@settings(max_examples=300, deadline=None)
@given(
    pair=pairs(),
    rtol=st.sampled_from([0.0, 1.3e-6, 1e-3, 1.6e-2, 0.3, 1e-40]),
    atol=st.sampled_from([0.0, 1e-5, 1e-30, 1.0]),
    size=st.sampled_from([256, 700, 1 << 16]),
)
def test_any_pair(pair: tuple[torch.Tensor, torch.Tensor], rtol: float, atol: float, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "BLOCK_ELEMENTS", size)
        check(*pair, rtol, atol)


@pytest.mark.parametrize("exponent", [-44, -30, -20, -13, -6, 0, 6, 18, 19, 30, 37])
def test_any_magnitude(exponent: int) -> None:
    g = torch.Generator().manual_seed(0)
    b = (torch.randn(5000, generator=g, dtype=torch.float64) * 10.0**exponent).float()
    check(b, b * (1 + 1e-6 * torch.randn(5000, generator=g)), 1e-6, 0.0)
    check(b, torch.randn(5000, generator=g), 1e-3, 1e-5)


@pytest.mark.parametrize("dtype", FLOATING[:3])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1.1, 123.456])
def test_a_constant_error_does_not_drift(value: float, dtype: torch.dtype) -> None:
    # Equal summands are rounded the same way each time.
    b = torch.full((200_000,), value, dtype=dtype)
    check(b, b * 3, 1e-6, 1e-6)
    check(b, b * 1.01, 1e-6, 1e-6)


def test_elements_on_the_tolerance_are_counted_as_float64_does() -> None:
    g = torch.Generator().manual_seed(0)
    b = torch.rand(20_000, generator=g) + 0.5
    for rtol in (1e-3, 1.3e-6, 0.1):
        c = (b.double() + 1e-5 + rtol * b.double()).float()
        want = by_definition(b, c, rtol, 1e-5).num_beyond
        assert 0 < want < b.numel()
        assert difference(b, c, rtol=rtol, atol=1e-5).num_beyond == want


def test_the_largest_of_errors_that_float32_cannot_tell_apart() -> None:
    b = torch.zeros(100_000)
    c = torch.ones(100_000)
    b[70_001] = -1e-12
    b[70_002] = -2e-12
    b[99_999] = -2e-12
    got = difference(b, c, rtol=0, atol=0)
    assert (got.worst, got.max_abs) == (70_002, 1 + float(np.float32(2e-12)))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30], ids=str)
@pytest.mark.parametrize("odd", [1.0, 0.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_definition_is_not_needed_for_ordinary_numbers(
    dtype: torch.dtype, odd: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It gives the same result, but ten times slower.
    b = (torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale).to(dtype)
    b[::3] = odd
    c = (b * 1.1).to(dtype)
    want = by_definition(b, c, 1e-3, 1e-5)
    monkeypatch.setattr(Totals, "add", None)
    assert difference(b, c, rtol=1e-3, atol=1e-5).num_different == want.num_different
    assert difference(b, b, rtol=1e-3, atol=1e-5).num_different == 0


def test_an_error_that_float32_rounds_onto_the_tolerance() -> None:
    b, c = torch.zeros(1000), torch.ones(1000)
    b[123] = -1e-12
    assert difference(b, c, rtol=0, atol=1.0).num_beyond == 1


def test_a_relative_error_beyond_the_range_of_float32() -> None:
    b, c = torch.ones(1000), torch.ones(1000)
    b[5], c[6] = 1e-42, 2
    b[7] = c[7] = 0
    check(b, c, 1e-3, 1e-5)
    assert 1e41 < difference(b, c, rtol=1e-3, atol=1e-5).max_rel < 1e43


@pytest.mark.parametrize(("size", "is_held"), [(2**53, True), (2**53 + 1, False), (2**62, False)])
def test_integers_that_float64_holds_need_no_definition(size: int, is_held: bool) -> None:
    b = torch.arange(-500, 500)
    b[3] = size
    c = b.clone()
    c[3], c[900] = size - 1, 7
    check(b, c, 0, 0)
    array = arithmetic_for({np.dtype(np.int64)}, 1000, 1 << 16, 0, 0)[0]
    with np.errstate(all="ignore"):
        found = array.partial(0, b.numpy(), c.numpy(), above=0.0)
    assert (found is not None) == is_held
    assert difference(b, c, rtol=0, atol=0).num_different == 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64, torch.uint64])
def test_integers_beyond_the_precision_of_float32(dtype: torch.dtype) -> None:
    b = torch.full((1000,), 2**30, dtype=torch.int64)
    c = b.clone()
    c[17] += 1
    got = difference(b.to(dtype), c.to(dtype), rtol=0, atol=0)
    assert (got.num_different, got.num_beyond, got.worst) == (1, 1, 17)


@pytest.mark.parametrize("dtype", FLOATING[:3])
def test_equal_infinities_are_no_error(dtype: torch.dtype) -> None:
    # A causal mask, the same on both sides but for one element.
    b = torch.full((300, 300), -math.inf).triu(1).to(dtype)
    check(b, b.clone(), 1e-3, 1e-5)
    c = b.clone()
    c[299, 0] = 0.25
    check(b, c, 1e-3, 1e-5)
    c[0, 299] = 0
    check(b, c, 1e-3, 1e-5)
    assert difference(b, c, rtol=1e-3, atol=1e-5).worst == 299


def test_a_cosine_near_one_does_not_cancel() -> None:
    g = torch.Generator().manual_seed(0)
    b = torch.randn(100_000, generator=g)
    c = b * (1 + 1e-4 * torch.randn(100_000, generator=g))
    got, want = difference(b, c, rtol=0, atol=0), by_definition(b, c, 0, 0)
    distance, expected = (
        1 - raw.dot / math.sqrt(raw.baseline_squares) / math.sqrt(raw.candidate_squares) for raw in (got, want)
    )
    assert expected < 1e-8
    assert distance == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_and_conjugated_views(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    b, c = torch.randn(2, 300, 400, generator=g).to(dtype)
    check(b.t(), c.t(), 0.1, 0.1)
    check(b[::2, 1::3], c[::2, 1::3], 0.1, 0.1)
    check(b[0].expand(40, 400), c[0].expand(40, 400), 0.1, 0.1)
    check(b[0, 7:], c[0, 7:], 0.1, 0.1)


def test_warnings_and_settings_of_the_caller_are_left_alone() -> None:
    with np.errstate(all="raise"):
        before = np.geterr()
        difference(torch.tensor([0.0, 1.0] * 300), torch.tensor([1.0, math.nan] * 300), rtol=1e30, atol=0)
        assert np.geterr() == before


@pytest.mark.skipif(sys.platform != "linux", reason="limits the data segment of a process")
@pytest.mark.parametrize(
    ("dtype", "mebibytes"),
    [
        ("float32", 128),
        pytest.param("bfloat16", 128, marks=pytest.mark.slow),
        *(pytest.param(dtype, 1024, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16", "float64", "int64")),
    ],
)
def test_large_mapped_tensors_take_a_fixed_amount_of_memory(dtype: str, mebibytes: int, tmp_path: Path) -> None:
    # The process may allocate 24 MiB more than at the start: a copy of a tensor would fail.
    program = f"""
        import resource, torch
        from glassengine.blocks import difference, paths
        paths.COMPILED_FROM = {paths.COMPILED_FROM}
        dtype, folder, size = torch.{dtype}, {str(tmp_path)!r}, {{}}
        tensors = [torch.from_file(folder + "/" + name, shared=True, size=size, dtype=dtype) for name in "bc"]
        tensors[1][-1] = 3
        difference(tensors[0][:100_000], tensors[0][:100_000] + 1, rtol=0, atol=0)
        used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
        limit = used * 1024 + (24 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        found = difference(*tensors, rtol=0, atol=0)
        assert (found.worst, found.num_different, found.max_abs) == (size - 1, 1, 3.0)
        strided = [tensor.view(-1, 64).t() for tensor in tensors]
        assert difference(*strided, rtol=0, atol=0).worst == size - 1
        try:
            tensors[0].clone()
        except RuntimeError as error:
            print("cannot allocate" if "allocate" in str(error) else error)
    """
    size = (mebibytes << 20) // getattr(torch, dtype).itemsize
    code = textwrap.dedent(program).format(size)
    done = children.run([sys.executable, "-c", code], timeout=600)
    assert done.stdout.strip() == "cannot allocate", done.stderr
