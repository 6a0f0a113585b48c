"""How the shapes of two tensors differ, and what would make them fit, for every pair of shapes."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glassengine.compare.compare import compare
from glassengine.compare.shapes import difference
from glassengine.errors import GlassError

SHAPES = [(), (0,), (1,), (4,), (0, 3), (1, 1), (4, 1), (2, 2), (2, 1, 2), (1, 4, 1, 1)]


def test_s3_every_two_shapes_have_a_sentence_on_how_they_differ() -> None:
    for x, y in itertools.permutations(SHAPES, 2):
        assert difference(x, y, "site").startswith(f"shapes differ: {list(x)} and {list(y)} (")


def test_packed_tokens_are_still_guessed() -> None:
    assert "packed tokens?" in difference((5, 8), (2, 4, 8), "site")
    assert "packed tokens?" in difference((2, 4), (3,), "site")


@pytest.mark.parametrize(("x", "y"), list(itertools.product([(), (0,), (1,), (3,), (2, 2)], repeat=2)))
def test_s3_files_with_tensors_of_two_shapes_are_compared(
    x: tuple[int, ...], y: tuple[int, ...], tmp_path: Path
) -> None:
    a, b = (save(tmp_path / name, {"loss": torch.ones(shape)}) for name, shape in (("a.pt", x), ("b.pt", y)))
    found = compare(a, b)
    assert found.verdict == ("identical" if x == y else "wrong")
    assert found.ok == (x == y)


def test_s3_leaves_that_are_no_tensors_are_told_and_do_not_end_the_comparison(tmp_path: Path) -> None:
    x = save(
        tmp_path / "x.pt", {"a": torch.ones(2), "b": "text", "c": None, "d": {"e": torch.ones(1), "f": [1.5, "g"]}}
    )
    y = save(tmp_path / "y.pt", {"a": torch.ones(2), "b": torch.ones(3), "c": 2.0, "d": torch.ones(1)})
    found = compare(x, y, min_coverage=0.0)
    assert [(pair.site, pair.verdict) for pair in found.pairs] == [("a", "identical")]
    assert {item.site for item in found.skipped} >= {"b"}


def test_s16_complex_numbers_are_compared_in_both_parts(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    values = [complex(nan, 1), complex(nan, 999), complex(1, nan), complex(nan, nan), complex(inf, 1), complex(inf, 2)]
    for i, j in itertools.product(range(len(values)), repeat=2):
        for shape in ((), (3,), (600,)):
            a = save(tmp_path / "a.pt", {"x": torch.full(shape, values[i], dtype=torch.complex64)})
            b = save(tmp_path / "b.pt", {"x": torch.full(shape, values[j], dtype=torch.complex64)})
            assert compare(a, b).verdict == ("identical" if i == j else "wrong"), (values[i], values[j], shape)


@pytest.mark.parametrize(
    ("x", "y", "verdict"),
    [
        (torch.tensor(True), torch.tensor(0.0), "wrong"),
        (torch.tensor([True, False]), torch.tensor([0.0, 1.0]), "wrong"),
        (torch.tensor([[True, False]]), torch.tensor([[0.0, 1.0]]), "wrong"),
        (torch.tensor([[True, False]]), torch.tensor([[1.0, 0.0]]), "identical"),
        (torch.tensor([[True, False]]), torch.tensor([[0.0, -math.inf]]), "identical"),
        (torch.tensor([[True, True]]), torch.tensor([[0.0, 0.0]]), "identical"),
        (torch.tensor([[True, False]]), torch.tensor([[0.0, 0.0]]), "wrong"),
        (torch.tensor(2**53 + 1), torch.tensor(2.0**53, dtype=torch.float64), "rounding"),
        (torch.tensor(-(2**53)), torch.tensor(-(2.0**53), dtype=torch.float64), "identical"),
        (torch.tensor(-1), torch.tensor(-1.0), "identical"),
    ],
)
def test_numbers_of_two_kinds_are_identical_where_they_mean_the_same(
    x: Tensor, y: Tensor, verdict: str, tmp_path: Path
) -> None:
    for ours, theirs in ((x, y), (y, x)):
        sides = save(tmp_path / "x.pt", {"t": ours}), save(tmp_path / "y.pt", {"t": theirs})
        assert compare(*sides).verdict == verdict


REAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 127.0, math.nan, math.inf, -math.inf, 1e30, 6e4, 2.0**31, 1e-40])
_NAMES = """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
complex64 complex128 float8_e4m3fn float8_e5m2"""
DTYPES = [getattr(torch, name) for name in _NAMES.split()]


@st.composite
def tensors(draw: Any) -> Tensor:
    """Draw a tensor of any dtype and a small shape, with odd numbers."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([*SHAPES, (300,)]))
    some = [draw(REAL) for _ in range(draw(st.integers(1, 3)))]
    count = math.prod(shape)
    values = torch.tensor([some[i % len(some)] for i in range(count)], dtype=torch.float64)
    if dtype.is_complex:
        parts = torch.tensor([some[(i + draw(st.integers(0, 2))) % len(some)] if i < 4 else 0.0 for i in range(count)])
        return torch.complex(values, parts.double()).to(dtype).reshape(shape)
    if not dtype.is_floating_point:
        values = values.nan_to_num(3.0, 100.0, 0.0 if not dtype.is_signed else -100.0).clamp(-100, 100)
        values = values.abs() if not dtype.is_signed else values
    return values.to(dtype).reshape(shape)


class _Source:
    """What is compared, without a file."""

    def __init__(self, path: Path, tensor: Tensor) -> None:
        from glassengine.recording.layout.layout import Entry
        from glassengine.recording.layout.values import dtype_name

        self.path, self.metadata, self.complete, self.skipped = path, {}, True, ()
        self.entries = (Entry("t", 0, 0, dtype_name(tensor.dtype), tuple(tensor.shape)),)
        self._tensor = tensor

    def tensor(self, _entry: Any) -> Tensor:
        return self._tensor


def _elements(tensor: Tensor) -> list[Any]:
    """Return the elements as Python numbers; NaN as text, as it equals nothing."""

    def known(number: Any) -> Any:
        if isinstance(number, complex):
            return known(number.real), known(number.imag)
        return ("nan", 0.0) if isinstance(number, float) and math.isnan(number) else (number, 0.0)

    return [known(complex(value)) for value in tensor.reshape(-1).tolist()]


@settings(max_examples=300, deadline=None)
@given(tensors(), tensors())
def test_s3_two_tensors_are_identical_exactly_where_all_their_numbers_are(x: Tensor, y: Tensor) -> None:
    try:
        found = compare(_Source(Path("x"), x), _Source(Path("y"), y))
    except GlassError as error:
        assert error.exit_status == 4
        return
    json.dumps(found.to_dict(), allow_nan=False)
    same = x.shape == y.shape and _elements(x) == _elements(y)
    if found.verdict == "identical" and not same:
        # Two numbers that hide what must not be chosen are the same to a softmax, and nothing else is.
        kinds = x.dtype, y.dtype
        assert all(kind.is_floating_point for kind in kinds) or torch.bool in kinds
        limits = [torch.finfo(side.dtype).max / 4 if side.is_floating_point() else 1 for side in (x, y)]
        assert x.shape == y.shape
        for ours, theirs in zip(x.reshape(-1).tolist(), y.reshape(-1).tolist(), strict=True):
            assert ours == theirs or (ours <= -limits[0] and theirs <= -limits[1]) or torch.bool in kinds
    assert not same or found.verdict == "identical"


def save(path: Path, tensors: dict[str, Any]) -> Path:
    """Write a file of tensors and return it."""
    torch.save(tensors, path)
    return path
