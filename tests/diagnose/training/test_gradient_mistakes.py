"""Where the forward is right and gradients are not, the place through which they flow is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine import check_training


class Gated(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.a, self.b, self.c = kind, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        with torch.set_grad_enabled(self.kind != "no_grad"):
            gate = torch.sigmoid(self.b(h))
        e = (h * (gate.detach() if self.kind == "gate" else gate)).exp()
        total = e.sum(-1, keepdim=True)
        y = self.c(e / (total.detach() if self.kind == "total" else total))
        if self.kind == "twice":
            y = 2 * y - y.detach()
        if self.kind == "sign":
            y = 2 * y.detach() - y
        return y + (h.detach() if self.kind == "skip" else h)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.saved_tensors[0] * gradient


class Scored(nn.Module):
    def __init__(self, is_wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c, self.is_wrong = nn.Linear(8, 8), nn.Linear(8, 8), is_wrong

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(Softmax.apply(h) if self.is_wrong else torch.softmax(h, -1))  # type: ignore[no-untyped-call]


def judged(baseline: nn.Module, candidate: nn.Module) -> Any:
    torch.manual_seed(1)
    return check_training(baseline, candidate, inputs=[{"x": torch.randn(4, 8)}], loss=lambda y: y.pow(2).mean())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("gate", "sigmoid.0 is detached before mul.0: no gradient flows back"),
        ("no_grad", "sigmoid.0 is detached before mul.0: no gradient flows back"),
        ("total", "sum.0 is detached before div.0: no gradient flows back"),
        ("skip", "tanh.0 is detached before add.0: no gradient flows back"),
        ("twice", "the gradient from add.0 to addmm.0 is 2 times the right one"),
        ("sign", "the gradient from add.0 to addmm.0 has the other sign"),
    ],
)
def test_the_gradient_is_named(kind: str, text: str) -> None:
    result = judged(Gated(""), Gated(kind))
    (origin,) = result.origins
    assert (origin.level, origin.hints[0].text, origin.hints[0].proven) == ("backward", text, True)
    assert text in result.not_ok_because and "the loss agrees" in result.not_ok_because


def test_an_op_of_a_backward_is_no_mistake_of_the_forward() -> None:
    result = judged(Scored(False), Scored(True))
    assert not result.ok and result.first_divergence.level == "backward"
    assert not any(hint.proven for origin in result.origins for hint in origin.hints)
    assert result.first_divergence.hints[0].text.startswith("in the gradient of ")


class Passes(nn.Module):
    def __init__(self, is_wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.is_wrong = nn.Linear(8, 8), nn.Linear(8, 8), is_wrong

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            back = self.b(x)
            x = torch.tanh(self.a(x) - (back.detach() if self.is_wrong else back))
        return x


def test_one_line_that_is_detached_in_every_pass_is_named() -> None:
    result = judged(Passes(False), Passes(True))
    (hint, *_) = result.first_divergence.hints
    assert hint.proven and "is detached before sub" in hint.text and hint.text.endswith("in 3 places")
    assert judged(Passes(True), Passes(True)).ok
