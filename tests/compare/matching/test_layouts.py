"""Layout operations: each makes two layouts one, each notices a wrong one, and none loses an element."""

from __future__ import annotations

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
from glassengine.compare.matching import layouts
from glassengine.compare.matching.layouts import difference
from glassengine.errors import GlassError, UsageError


def nothing(name: str) -> torch.Tensor:
    raise AssertionError(name)


def run(tensor: torch.Tensor, *operations: dict[str, Any], **tensors: torch.Tensor) -> torch.Tensor:
    parsed = [layouts.parse_operation(operation, "test") for operation in operations]
    return layouts.apply(parsed, tensor, lookup=tensors.__getitem__ if tensors else nothing)


X = torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ({"op": "transpose"}, X.mT),
        ({"op": "transpose", "dims": [0, 1]}, X.transpose(0, 1)),
        ({"op": "permute", "dims": [2, 0, 1]}, X.permute(2, 0, 1)),
        ({"op": "reshape", "shape": [0, 0, 2, -1]}, X.reshape(2, 3, 2, 2)),
        ({"op": "flatten"}, X.flatten()),
        ({"op": "flatten", "start": 0, "end": 1}, X.reshape(6, 4)),
        ({"op": "unsqueeze", "dim": -1}, X[..., None]),
        ({"op": "slice", "dim": -1, "start": 1, "end": 3}, X[..., 1:3]),
        ({"op": "slice", "dim": 1, "start": -1}, X[:, -1:]),
        ({"op": "slice", "dim": 0, "step": 2}, X[::2]),
        ({"op": "select", "dim": 1, "index": 2}, X[:, 2]),
        ({"op": "split", "dim": 2, "parts": 2, "index": 1}, X[..., 2:]),
        ({"op": "split", "dim": 1, "sizes": [1, 2], "index": 1}, X[:, 1:]),
        ({"op": "cast", "dtype": "float16"}, X.half()),
        ({"op": "pack", "mask": [[0, 1, 1], [1, 1, 1]]}, torch.cat([X[0, 1:], X[1]])),
    ],
)
def test_each_operation(operation: dict[str, Any], expected: torch.Tensor) -> None:
    got = run(X, operation)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


def test_operations_follow_one_another() -> None:
    fused = torch.randn(2, 5, 3 * 4 * 6)
    q, k, v = fused.chunk(3, -1)
    for index, part in enumerate((q, k, v)):
        heads = run(
            fused,
            {"op": "split", "dim": -1, "parts": 3, "index": index},
            {"op": "reshape", "shape": [0, 0, 4, 6]},
            {"op": "transpose", "dims": [1, 2]},
        )
        assert torch.equal(heads, part.reshape(2, 5, 4, 6).transpose(1, 2))


def test_a_squeezed_dimension_has_one_entry() -> None:
    assert run(X[:, :1], {"op": "squeeze", "dim": 1}).shape == (2, 4)
    with pytest.raises(UsageError, match="not of size 1"):
        run(X, {"op": "squeeze", "dim": 1})


def test_a_cast_keeps_the_imaginary_part() -> None:
    x = torch.tensor([1 + 2j])
    assert run(x, {"op": "cast", "dtype": "complex128"}).dtype == torch.complex128
    with pytest.raises(UsageError, match="has no imaginary part"):
        run(x, {"op": "cast", "dtype": "float32"})


def test_the_mask_of_a_decode_step_covers_the_cache() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    step = torch.tensor([[[1.0]], [[2.0]]])
    assert run(step, {"op": "pack", "mask": "attention_mask"}, attention_mask=mask).tolist() == [[1.0]]


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "permute", "dims": [0, 1]},
        {"op": "permute", "dims": [0, 0, 1]},
        {"op": "transpose", "dims": [0, 7]},
        {"op": "transpose", "dims": [0, 1, 2]},
        {"op": "reshape", "shape": [5, -1]},
        {"op": "reshape", "shape": [0, 0, 0, 0]},
        {"op": "slice", "dim": 1, "start": 2, "end": 9},
        {"op": "slice", "dim": 9},
        {"op": "slice", "dim": 1, "start": -4},
        {"op": "slice", "dim": 0, "step": 0},
        {"op": "select", "dim": 0, "index": 2},
        {"op": "split", "dim": 2, "parts": 3, "index": 0},
        {"op": "split", "dim": 2, "parts": 0, "index": 0},
        {"op": "split", "dim": 2, "sizes": [1, 2], "index": 0},
        {"op": "split", "dim": 2, "parts": 2, "index": 2},
        {"op": "pack", "mask": [[1, 1], [1, 1]]},
        {"op": "pack", "mask": [[1, 1, 1]]},
    ],
)
def test_an_operation_that_does_not_fit(operation: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"does not fit the tensor(.|\n)*float32\[2, 3, 4\]"):
        run(X, operation)


@pytest.mark.parametrize(
    "operation", [{"op": "slice", "dim": 1, "start": 3}, {"op": "pack", "mask": [[0, 0, 0], [0, 0, 0]]}]
)
def test_an_operation_that_leaves_nothing_is_an_error(operation: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="leaves nothing to compare"):
        run(X, operation)
    assert run(X[:0], {"op": "transpose"}).shape == (0, 4, 3)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("transpose", "is not an operation"),
        ({"dims": [0, 1]}, "is not an operation"),
        ({"op": "permutate", "dims": [0]}, r"unknown operation 'permutate'(.|\n)*expected: permute"),
        ({"op": "permute"}, "permute needs 'dims'"),
        ({"op": "permute", "dim": [0]}, "permute has no argument 'dim'"),
        ({"op": "permute", "dims": 0}, "'dims' of permute"),
        ({"op": "permute", "dims": [True]}, "'dims' of permute"),
        ({"op": "split", "dim": 0, "index": 0}, "one of 'parts' and 'sizes'"),
        ({"op": "split", "dim": 0, "index": 0, "parts": 1, "sizes": [1]}, "one of 'parts' and 'sizes'"),
        ({"op": "split", "parts": 2, "index": 0}, "split needs 'dim'"),
        ({"op": "cast", "dtype": "float31"}, "'dtype' of cast"),
        ({"op": "cast", "dtype": "__class__"}, "'dtype' of cast"),
        ({"op": "pack", "mask": []}, "'mask' of pack"),
        ({"op": "slice", "dim": 0, "end": "4"}, "'end' of slice"),
    ],
)
def test_unknown_layout_operations_are_refused(operation: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        layouts.parse_operation(operation, "rule 0")


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_the_inverse_operation_gives_the_tensor_back(shape: list[int], data: st.DataObject) -> None:
    x = torch.arange(math.prod(shape)).reshape(shape)
    dims = data.draw(st.permutations(range(len(shape))))
    inverse = [dims.index(i) for i in range(len(dims))]
    dim = data.draw(st.integers(0, len(shape)))
    start = data.draw(st.integers(0, len(shape) - 1))
    for there, back in (
        ({"op": "permute", "dims": dims}, {"op": "permute", "dims": inverse}),
        ({"op": "unsqueeze", "dim": dim}, {"op": "squeeze", "dim": dim}),
        ({"op": "flatten", "start": start}, {"op": "reshape", "shape": shape}),
    ):
        assert torch.equal(run(run(x, there), back), x)
    if shape[start] > 1:
        cut = data.draw(st.integers(1, shape[start] - 1))
        sizes = [cut, shape[start] - cut]
        parts = [run(x, {"op": "split", "dim": start, "sizes": sizes, "index": i}) for i in (0, 1)]
        assert torch.equal(torch.cat(parts, start), x)


def advised(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text[text.index("[{") + 1 : text.rindex("}") + 1])
    return found


@settings(max_examples=200, deadline=None)
@given(x=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_the_advice_makes_the_shapes_fit(x: list[int], data: st.DataObject) -> None:
    elements = math.prod(x)
    divisors = [d for d in range(1, elements + 1) if elements % d == 0]
    first = data.draw(st.sampled_from(divisors))
    y = data.draw(
        st.one_of(
            st.permutations(x),
            st.just([first, elements // first]),
            st.integers(0, len(x)).map(lambda i: [*x[:i], 1, *x[i:]]),
        )
    )
    if y == x:
        return
    text = layouts.difference(tuple(x), tuple(y), "site")
    if "--transpose" in text:
        assert torch.empty(x).mT.shape == torch.Size(y)
    else:
        assert list(run(torch.empty(y), advised(text)).shape) == x


@pytest.mark.parametrize(
    ("x", "y", "advice"),
    [
        ((4, 6), (6, 4), "(dimensions 0, 1); they agree when transposed: --transpose 'a.b'"),
        ((2, 5, 8), (2, 5, 24), '(dimension 2); a fused candidate? --map: "candidate_ops": [{"op": "split"'),
        ((2, 5, 24), (2, 5, 8), '(dimension 2); a fused baseline? --map: 3 candidates with "concat_dim": 2'),
        ((2, 5, 8), (7, 8), '(3 and 2 dimensions); packed tokens? --map: "baseline_ops": [{"op": "pack"'),
        ((7, 8), (2, 5, 8), '(2 and 3 dimensions); packed tokens? --map: "candidate_ops": [{"op": "pack"'),
        ((3,), (4,), "(dimension 0)"),
        ((), (0, 2), "(0 and 2 dimensions)"),
    ],
)
def test_advice(x: tuple[int, ...], y: tuple[int, ...], advice: str) -> None:
    text = layouts.difference(x, y, "a.b")
    assert f"shapes differ: {list(x)} and {list(y)} {advice}" in text
    assert "map" in text or "--map" not in advice


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
        from glassengine.recording.layout.tensors import dtype_name

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
