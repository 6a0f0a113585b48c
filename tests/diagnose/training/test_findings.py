"""Wrong backward passes: the gradients that are wrong are named first, and never a forward op that is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glassengine as glass

Backward = Callable[[Tensor, Tensor], Tensor]


def function(forward: Callable[[Tensor], Tensor], backward: Backward) -> Callable[[Tensor], Tensor]:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return backward(gradient, *ctx.saved_tensors)

    return Custom.apply  # type: ignore[no-any-return]


def normed(x: Tensor, *, detach_mean: bool = False, detach_variance: bool = False) -> Tensor:
    variance, mean = torch.var_mean(x.view(-1, 4, 4), -1, unbiased=False, keepdim=True)
    mean = mean.detach() if detach_mean else mean
    variance = variance.detach() if detach_variance else variance
    return ((x.view(-1, 4, 4) - mean) * torch.rsqrt(variance + 1e-5)).view_as(x)


def silu(gradient: Tensor, x: Tensor) -> Tensor:
    s = x.sigmoid()
    return gradient * s * (1 + x * (1 - s))


class Net(nn.Module):
    """x [B, 8], target [B] -> the loss."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mistake = mistake
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.GroupNorm(4, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)

    def normed(self, x: Tensor) -> Tensor:
        if self.mistake in ("var_mean", "detached mean", "detached variance"):
            found = normed(
                x,
                detach_mean="mean" in self.mistake and self.mistake != "var_mean",
                detach_variance="variance" in self.mistake,
            )
            return found * self.norm.weight + self.norm.bias
        return self.norm(x)

    def acted(self, x: Tensor) -> Tensor:
        backward = ACTIVATIONS.get(self.mistake)
        return F.silu(x) if backward is None else function(F.silu, backward)(x)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.normed(self.first(x))
        y = self.acted(self.second(h))
        h = h.detach() + y if self.mistake == "detached residual" else h + y
        h = function(torch.clone, lambda g, _: -g)(h) if self.mistake == "sign" else h
        h = function(torch.clone, lambda g, _: g.clamp(-0.05, 0.05))(h) if self.mistake == "clipped" else h
        h = function(torch.clone, lambda g, _: torch.cat([g[:3], 0 * g[3:]]))(h) if self.mistake == "rows" else h
        logits = self.last(h)
        scale = 0.5 if self.mistake == "half" else 2.0 if self.mistake == "twice" else 1.0
        logits = logits if scale == 1 else function(torch.clone, lambda g, _: scale * g)(logits)
        return {"loss": F.cross_entropy(logits, target)}


ACTIVATIONS: dict[str, Backward] = {
    "right": silu,
    "half of it": lambda g, x: g * x.sigmoid(),
    "straight through": lambda g, x: g,
    "relu": lambda g, x: g * (x > 0),
    "twice the gradient": lambda g, x: 2 * silu(g, x),
    "zero": lambda g, x: torch.zeros_like(g),
    "of gelu": lambda g, x: g * (0.5 * (1 + torch.erf(x / 2**0.5)) + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5),
    "no derivative": lambda g, x: silu(torch.ones_like(g), x),
    "of its result": lambda g, x: silu(g, F.silu(x)),
    "one column": lambda g, x: torch.cat([silu(g, x)[:, :-1], g[:, -1:]], 1),
    "rolled": lambda g, x: silu(g, x).roll(1, 0),
    "in half precision": lambda g, x: silu(g.bfloat16(), x.bfloat16()).float(),
}
MISTAKES = {name: "second" for name in ACTIVATIONS if name != "right"}
MISTAKES |= {"detached mean": "first", "detached variance": "first", "detached residual": "norm"}
MISTAKES |= {"sign": "second", "clipped": "second", "rows": "second", "half": "last", "twice": "last"}
"""Mistake -> the module whose gradient is the first that is wrong."""
QUICK = ("half of it", "detached variance")


def checked(mistake: str) -> glass.Comparison:
    torch.manual_seed(1)
    batch = {"x": torch.randn(6, 8), "target": torch.randint(0, 3, (6,))}
    return glass.check_training(
        Net(),
        candidate=Net(mistake),
        inputs=[batch],
        optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.1),
    )


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MISTAKES]
)
def test_f72_a_wrong_backward_is_named_as_the_gradient_of_its_parameter(mistake: str) -> None:
    result = checked(mistake)
    first = result.first_divergence
    assert not result.ok and first is not None and first.level != "forward", mistake
    assert str(result.not_ok_because).startswith("the loss agrees, "), result.not_ok_because
    assert f"gradients are wrong, first that of {MISTAKES[mistake]}." in str(result.not_ok_because), (
        result.not_ok_because
    )
    assert (
        ":backward/" in first.site
        and first.candidate_source is not None
        and "test_findings.py" in first.candidate_source
    )


@pytest.mark.parametrize("right", ["right", "var_mean"])
def test_f72_a_right_backward_of_ones_own_is_ok(right: str) -> None:
    result = checked(right)
    assert result.ok, result.not_ok_because
