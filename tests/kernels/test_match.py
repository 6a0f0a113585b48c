"""`glass.matches`: right implementations pass, wrong ones are found, and messages say where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import glassengine as glass
from glassengine.errors import UsageError
from tests.kernels.corpus import right
from tests.kernels.corpus.right import CASES, drawn


def softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def by_exp2(x: Tensor) -> Tensor:
    e = torch.exp2((x - x.amax(-1, keepdim=True)) * 1.4426950408889634)
    return e / e.sum(-1, keepdim=True)


def with_a_tail(x: Tensor) -> Tensor:
    y = F.softmax(x, -1).clone()
    y[..., -3:] = 0
    return y


@pytest.mark.parametrize("reference", [softmax, lambda x: F.softmax(x, -1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_formulas_match(reference: Any, dtype: torch.dtype) -> None:
    x = drawn(64, 200, dtype=dtype)
    for formula in (softmax, lambda x: by_exp2(x.float()).to(x.dtype), lambda x: F.softmax(x.float(), -1).to(x.dtype)):
        assert glass.matches(formula, reference, (x,)).ok
        assert glass.assert_matches(formula(x), reference, x).ok


def test_the_message_says_where_and_how_far() -> None:
    with pytest.raises(AssertionError) as caught:
        glass.assert_matches(with_a_tail, softmax, (drawn(64, 200),))
    text = str(caught.value)
    assert "the last 3 columns (192 beyond rounding)" in text and "ulp apart" in text, text


def test_scale_is_found() -> None:
    found = glass.matches(lambda x: softmax(x) * 1.0001, softmax, (drawn(64, 200),))
    assert found.verdict == "wrong" and found.worst is not None and found.worst.num_beyond > 1000


def test_inputs_that_are_written_are_seen() -> None:
    def writes(x: Tensor) -> Tensor:
        return x.add_(1) * 2

    def right(x: Tensor) -> Tensor:
        return (x + 1) * 2

    x = drawn(4, 4)
    before = x.clone()
    assert not glass.matches(writes, right, (x,)).ok
    assert not glass.matches(right, writes, (x,)).ok
    assert glass.matches(writes, writes, (x,)).ok
    assert torch.equal(x, before)


def test_integers_are_exact_but_for_ties() -> None:
    def top(x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.topk(5)
        return values, places

    def from_behind(x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.flip(-1).topk(5)
        return values, x.shape[-1] - 1 - places

    x = drawn(16, 64).round()
    assert glass.matches(from_behind, top, (x,)).ok
    assert not torch.equal(from_behind(x)[1], top(x)[1])
    assert not glass.matches(lambda x: (top(x)[0], top(x)[1] * 0), top, (x,)).ok
    assert not glass.matches(lambda x: x.argmax(-1) + 1, lambda x: x.argmax(-1), (x,)).ok


def test_dtypes_shapes_and_trees() -> None:
    x = drawn(8, 8)
    assert not glass.matches(lambda x: x.double(), lambda x: x * 1, (x,)).ok
    assert glass.matches(lambda x: (x * 2).bfloat16(), lambda x: x + x, (x,), check_dtype=False).ok
    assert not glass.matches(lambda x: x[:4], lambda x: x + 0, (x,)).ok
    assert not glass.matches(lambda x: (x, x), lambda x: (x,), (x,)).ok
    assert glass.matches(lambda x: {"a": [x, 3]}, lambda x: {"a": [x + 0, 3]}, {"x": x}).ok
    assert not glass.matches(lambda x: {"a": [x, 4]}, lambda x: {"a": [x + 0, 3]}, {"x": x}).ok


def test_values_not_finite_are_compared_by_kind() -> None:
    x = drawn(8, 8)
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    assert glass.matches(lambda x: x + x, lambda x: x * 2, (x,)).ok
    assert not glass.matches(lambda x: (x * 2).nan_to_num(), lambda x: x * 2, (x,)).ok
    large = torch.full((4,), 300.0, dtype=torch.float16)
    assert glass.matches(lambda x: x * x, lambda x: x.square(), (large,)).ok
    assert glass.matches(lambda x: (x.float() * x.float()).half(), lambda x: x.square(), (large,)).ok


def test_arrays_are_tensors() -> None:
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    assert glass.matches(np.tanh, torch.tanh, (x,)).ok
    assert not glass.matches(lambda x: np.tanh(x) * 1.001, torch.tanh, (x,)).ok


def test_large_tensors_are_judged_by_rows() -> None:
    x = drawn(1500, 2048)
    assert glass.matches(by_exp2, softmax, (x,)).ok
    found = glass.matches(with_a_tail, softmax, (x,))
    assert not found.ok and found.worst is not None and found.worst.where == "the last 3 columns"
    assert glass.matches(lambda x: x.T.contiguous().cumsum(1).T, lambda x: x.cumsum(0), (x,)).ok


def test_loops_and_branches_on_values() -> None:
    def loops(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row in range(int(x[0, 0].item() > 0) + 2):
            out[row] = x[row].softmax(-1)
        return out

    x = drawn(8, 8)
    assert glass.matches(lambda x: loops(x) * 1, loops, (x,)).ok
    assert not glass.matches(lambda x: loops(x) * 1.001, loops, (x,)).ok


def test_random_references_and_wrong_words_are_refused() -> None:
    x = drawn(4, 4)
    with pytest.raises(UsageError, match="random"):
        glass.matches(x, lambda x: F.dropout(x, 0.5), (x,))
    with pytest.raises(UsageError, match="accumulation"):
        glass.matches(x, lambda x: x, (x,), accumulation="float3")


def test_a_reference_that_cannot_be_traced_is_run_as_a_whole() -> None:
    def outside(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.detach().numpy())) * 2

    x = drawn(8, 8)
    found = glass.matches(lambda x: torch.sin(x) * 2, outside, (x,))
    assert found.ok and found.not_traced
    assert not glass.matches(lambda x: torch.sin(x) * 2.001, outside, (x,)).ok
    table = drawn(5, 8)
    assert glass.matches(lambda x: x + table[:1], lambda x: x + table[0], (x,)).not_traced is None


def test_rows_that_depend_on_each_other_are_judged_together() -> None:
    x = drawn(2048, 2048)
    assert glass.matches(lambda x: x - x.mean(0), lambda x: x - x.sum(0) / len(x), (x,)).ok

    def drifts(x: Tensor) -> Tensor:
        return x + 1e-3 * x.cumsum(0)

    assert glass.matches(lambda x: x + x.cumsum(0) / 1000, drifts, (x,)).ok
    assert not glass.matches(lambda x: x + 1.001e-3 * x.cumsum(0), drifts, (x,)).ok


def test_choices_that_rounding_turns_are_left_out() -> None:
    def route(x: Tensor, w: Tensor) -> Tensor:
        chosen = (x @ w).argmax(-1, keepdim=True)
        return torch.where(chosen % 2 == 0, x, -x) * 3

    def in_float32(x: Tensor, w: Tensor) -> Tensor:
        return route(x.float(), w.float()).to(x.dtype)

    x, w = drawn(2000, 16, dtype=torch.bfloat16), drawn(16, 8, seed=1, dtype=torch.bfloat16)
    found = glass.matches(in_float32, route, (x, w))
    assert found.ok and found.tensors[0].num_tied > 0
    assert not glass.matches(lambda x, w: route(x, w) * 1.1, route, (x, w)).ok


def test_float64_is_judged_by_its_own_rounding_and_left_as_it_is() -> None:
    x = drawn(16, 33).double()
    given = by_exp2(x)
    before = given.clone()
    assert not glass.matches(lambda x: softmax(x.float()).double(), softmax, (x,)).ok
    assert not glass.matches(lambda x: F.softmax(x.float(), -1).double(), lambda x: F.softmax(x, -1), (x,)).ok
    right = 1 / (1 + torch.exp(-x))
    assert glass.matches(right, torch.sigmoid, (x,)).ok
    glass.matches(given, softmax, (x,))
    assert torch.equal(given, before)


def test_numbers_of_eight_bits() -> None:
    def cast(x: Tensor) -> Tensor:
        return (x * 1.1).to(torch.float8_e4m3fn)

    x = drawn(16, 33)
    assert glass.matches(lambda x: (x.double() * 1.1).to(torch.float8_e4m3fn), cast, (x,)).ok
    assert glass.matches(cast, lambda x: x * 1.1, (x,), check_dtype=False).ok
    assert not glass.matches(lambda x: (x * 1.4).to(torch.float8_e4m3fn), cast, (x,)).ok


def test_a_comparison_of_given_numbers_has_no_ties() -> None:
    x = drawn(16, 33).round()
    assert not glass.matches(lambda x: x >= 0, lambda x: x > 0, (x,)).ok


def test_results_with_names_are_compared_by_name() -> None:
    x = drawn(4, 5)

    def reference(x: Tensor) -> dict[str, Any]:
        return {"a": x, "b": {"sum": x.sum(-1), "more": [x + 1, None]}}

    assert glass.matches(lambda x: {"b": {"more": [x + 1, None], "sum": x.sum(-1)}, "a": x}, reference, (x,)).ok
    exchanged = glass.matches(lambda x: {"b": x, "a": x + 1}, lambda x: {"a": x, "b": x + 1}, (x,))
    assert not exchanged.ok and [one.path for one in exchanged.tensors] == ["['a']", "['b']"]
    assert exchanged.mistakes
    other = glass.matches(lambda x: {"c": x}, lambda x: {"a": x}, (x,))
    assert not other.ok and other.tensors[0].reason == "results named ['c'], expected ['a']"
    assert glass.matches(lambda x: (x, x + 1), lambda x: {"a": x, "b": x + 1}, (x,)).ok


def test_a_reference_that_gives_nothing_is_refused() -> None:
    x = drawn(4, 5)
    for nothing in (lambda x: None, lambda x: [], lambda x: {"a": None}):
        with pytest.raises(UsageError, match="gives nothing to compare"):
            glass.matches(nothing, nothing, (x,))


@pytest.mark.parametrize(("by", "ok"), [(1.0, True), (2.0, False)])
def test_a_reference_that_only_writes_is_compared_by_what_it_writes(by: float, ok: bool) -> None:
    def adds(by: float) -> Any:
        def call(x: Tensor) -> None:
            x.add_(by)

        return call

    assert glass.matches(adds(by), adds(1.0), (drawn(4, 5),)).ok == ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_of_whole_numbers_are_computed_in_float64(dtype: torch.dtype) -> None:
    """Torch makes float32 of whole numbers and a Python float, also beside float64."""

    def turned(x: Tensor, base: float = 10000.0, start: int = 0) -> Tensor:
        angles = (torch.arange(x.shape[0])[:, None] + start) * base ** (-torch.arange(0, 16) / 16)
        c, s = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    x, w = drawn(40, 32, dtype=dtype), torch.arange(32 * 24).reshape(32, 24) % 16
    assert glass.matches(lambda x: turned(x.float()).to(x.dtype), lambda x: turned(x), (x,)).ok
    for wrong in (lambda x: turned(x, start=1), lambda x: turned(x, 5000.0), lambda x: turned(x.flip(-1)).flip(-1)):
        assert not glass.matches(wrong, lambda x: turned(x), (x,)).ok
    unpacked = [lambda x, w, zero=zero: x @ ((w - zero) * 0.0625).to(x.dtype) for zero in (7, 8)]
    assert not glass.matches(*unpacked, (x, w)).ok


def test_results_that_are_truncated_are_found() -> None:
    def chopped(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)

    a, b = drawn(64, 45, dtype=torch.bfloat16), drawn(45, 64, seed=1, dtype=torch.bfloat16)

    def in_float32(x: Tensor) -> Tensor:
        return x.float().softmax(-1).to(x.dtype)

    assert glass.matches(lambda x: torch.log_softmax(x.float(), -1).exp().to(x.dtype), in_float32, (a,)).ok
    for found in (
        glass.matches(lambda x: chopped(x.float().softmax(-1)), in_float32, (a,)),
        glass.matches(lambda a, b: chopped(a.float() @ b.float()), torch.matmul, (a, b)),
    ):
        assert not found.ok and found.mistakes[0].text == "results are truncated, not rounded to the nearest"


def test_a_factor_of_each_channel_is_found() -> None:
    def norm(x: Tensor, v: Tensor) -> Tensor:
        return x / torch.sqrt(v[:, None] + 1e-3)

    def outside(x: Tensor, v: Tensor) -> Tensor:
        return (x.float() / (v.float()[:, None].sqrt() + 1e-3)).to(x.dtype)

    x, v = drawn(4, 16, 25, dtype=torch.bfloat16), (torch.arange(16) / 800 + 0.01).to(torch.bfloat16)
    assert glass.matches(lambda x, v: norm(x.float(), v.float()).to(x.dtype), norm, (x, v)).ok
    assert not glass.matches(outside, norm, (x, v)).ok


def test_the_bound_is_that_of_the_elements_where_they_end_up() -> None:
    def exp(x: Tensor) -> Tensor:
        return torch.exp(x).flip(-1)

    x = drawn(8, 45)
    assert glass.matches(lambda x: exp(x) * (1 + 2.0**-23), exp, (x,)).ok
    assert glass.matches(lambda x, y: x + 0.9 * (y - x), lambda x, y: torch.lerp(x, y, 0.9), (x, x.flip(0))).ok


# Functions of the same values whose derivatives are others: a table of which half is read, and a rounded exponent.
OTHER_DERIVATIVES = {("rope", name) for name in ("halves", "complex", "native")} | {("softmax", "polynomial")}
SAME = [
    (case, name)
    for case in CASES
    for name in case.right
    if case.name != "top three" and (case.name, name) not in OTHER_DERIVATIVES
]


def judge(some: list[Any], dtype: torch.dtype) -> None:
    for case, name in some:
        glass.testing.assert_gradients_match(case.right[name], case.reference, case.inputs(dtype))


def test_gradients_of_right_implementations_match() -> None:
    judge(SAME[::16], torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_all_right_implementations_match(dtype: torch.dtype) -> None:
    judge(SAME, dtype)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return given[0] @ w.T, x[:-1].T @ given[0][:-1]


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return y * given[0]


def test_wrong_gradients_are_found() -> None:
    with pytest.raises(AssertionError, match="beyond rounding"):
        glass.testing.assert_gradients_match(Product.apply, torch.matmul, (drawn(20, 30), drawn(30, 8, seed=1)))
    with pytest.raises(AssertionError):
        glass.testing.assert_gradients_match(Softmax.apply, lambda x: x.softmax(-1), drawn(20, 30))
    with pytest.raises(AssertionError):
        glass.testing.assert_gradients_match(right.tanh_gelu, F.gelu, drawn(20, 30))


def test_gradients_of_gradients() -> None:
    glass.testing.assert_gradients_match(right.gelu_by_erf, F.gelu, drawn(20, 30), double=True)
    with pytest.raises(AssertionError):
        glass.testing.assert_gradients_match(lambda x: x.detach() * x * x, lambda x: x**3, drawn(20, 30), double=True)


def test_only_what_is_asked_has_gradients() -> None:
    x, w = drawn(8, 8).requires_grad_(), drawn(8, 8, seed=1)
    found = glass.testing.assert_gradients_match(lambda x, w: x * w.detach(), lambda x, w: x * w, (x, w))
    assert len([one for one in found.tensors if not one.path.startswith("inputs")]) == 1
    with pytest.raises(UsageError, match="no gradients"):
        glass.testing.assert_gradients_match(lambda x: x, lambda x: x, torch.arange(3))


def test_samples() -> None:
    p = torch.tensor([0.5, 0.25, 0.2, 0.05, 0.0])
    generator = torch.Generator().manual_seed(0)

    def drawn(q: torch.Tensor, number: int = 4000) -> torch.Tensor:
        return torch.multinomial(q, number, replacement=True, generator=generator)

    assert glass.testing.assert_samples_match(drawn(p), p) > 1e-6
    with pytest.raises(AssertionError, match="not this distribution"):
        glass.testing.assert_samples_match(drawn(torch.tensor([0.4, 0.35, 0.2, 0.05, 0.0])), p)
    with pytest.raises(AssertionError, match="no chance"):
        glass.testing.assert_samples_match(drawn(torch.tensor([0.5, 0.25, 0.2, 0.04, 0.01])), p)
    with pytest.raises(AssertionError, match="outside"):
        glass.testing.assert_samples_match(torch.tensor([7]), p)
    with pytest.raises(UsageError, match="too few"):
        glass.testing.assert_samples_match(torch.tensor([1, 2]), p)


@pytest.mark.parametrize("probabilities", [[float("nan"), 1.0], [-1.0, 2.0], [0.0, 0.0], [float("inf"), 1.0]])
def test_invalid_distributions_are_refused(probabilities: list[float]) -> None:
    with pytest.raises(UsageError, match="not a distribution"):
        glass.testing.assert_samples_match(torch.zeros(100, dtype=torch.int64), torch.tensor(probabilities))
