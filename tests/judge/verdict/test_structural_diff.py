"""What is said of ops that only one side has, and what is not: a right port has other ops, too."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glassengine as glass

BIAS = torch.linspace(0.3, 40, 25).sin().view(5, 5)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.q(x), self.k(x), self.v(x))


def in_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(12)).softmax(-1) @ v


def as_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With a mistake that no hypothesis makes."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=BIAS)


def softened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(12)
    return F.softplus(scores * torch.linspace(0.3, 1.9, 5).sin()).softmax(-1) @ v


@pytest.mark.parametrize(("wrong", "is_said"), [(as_one, False), (softened, True)])
def test_fused_attention_alone_is_no_explanation(wrong: Attend, is_said: bool) -> None:
    inputs = {"x": torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))}
    found = glass.check(Net(in_steps).eval(), candidate=Net(wrong).eval(), inputs=inputs)
    assert not found.ok and found.first_divergence is not None
    said = [hint.text for hint in found.first_divergence.hints if "the baseline has" in hint.text]
    assert bool(said) == is_said, found.first_divergence.hints
