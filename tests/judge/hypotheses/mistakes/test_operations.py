"""The derivative of an activation in a backward: another one, and a part of the right one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.judge.hypotheses.mistakes.test_losses import asked

X, GRADIENT = (torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


def backward(x: Tensor, gradient: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gradient * gate * (1 + x * (1 - gate))


def slope(function: object, x: Tensor) -> Tensor:
    given = x.clone().requires_grad_()
    return torch.autograd.grad(function(given).sum(), given)[0]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (GRADIENT * torch.sigmoid(X), "its gate alone"),
        (GRADIENT * slope(F.gelu, X), "that of gelu in"),
        (GRADIENT * slope(torch.relu, X), "that of relu in"),
    ],
)
def test_another_derivative_is_named(made: Tensor, text: str) -> None:
    (hint,) = asked(backward, made, X, GRADIENT)
    assert hint.proven and hint.kind == "activation" and "derivative of silu" in hint.text and text in hint.text, hint


def test_a_product_is_no_derivative() -> None:
    (hint,) = asked(lambda x, y: x * y, X * GRADIENT * 2, X, GRADIENT)
    assert hint.kind == "scale"


def test_a_product_with_a_mask_is_no_derivative() -> None:
    """Zeros and ones are what relu makes of them, and its slope there."""
    mask = (GRADIENT > 0).float()
    (hint,) = asked(lambda x, y: x * y, X, X, mask)
    assert (hint.kind, hint.proven) == ("mask", True) and "is not multiplied" in hint.text, hint
