"""Layout operations: each makes two layouts one, each notices a wrong one, and none loses an element."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassengine.compare import shapes
from glassengine.compare.matching import layouts
from glassengine.errors import UsageError


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
    text = shapes.difference(tuple(x), tuple(y), "site")
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
    text = shapes.difference(x, y, "a.b")
    assert f"shapes differ: {list(x)} and {list(y)} {advice}" in text
    assert "map" in text or "--map" not in advice
