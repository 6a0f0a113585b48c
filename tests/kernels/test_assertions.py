"""Gradients of right implementations match, those of wrong ones do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import glassengine as glass
from glassengine.errors import UsageError
from tests.kernels.corpus import right
from tests.kernels.corpus.right import CASES, drawn

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
