"""Ops that a port leaves out: the kind follows from what they do, not from what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check

LEFT_OUT = {
    "flags": ("mask", "is not multiplied"),
    "choice": ("mask", "is taken everywhere"),
    "choice of values": ("other", "is taken everywhere"),
    "order": ("permuted", "index is missing"),
    "moved": ("position", "roll is missing"),
    "factor": ("scale", "is not multiplied"),
    "shares": ("activation", "log_softmax is missing"),
}


class Whole(nn.Module):
    """x [2, 6, 6] and what of it is seen [2, 6]: each step may be left out."""

    def __init__(self, left_out: str = "") -> None:
        super().__init__()
        self.left_out = left_out
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, 6))
        self.register_buffer("order", torch.tensor([3, 1, 5, 0, 2, 4]))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x.sin() if self.left_out == "flags" else x.sin() * seen.unsqueeze(-1).to(x.dtype)
        shown = (x + 0.5 * x.roll(1, 1)).exp() + 1.0
        x = shown if self.left_out == "choice" else torch.where(seen.unsqueeze(-1), shown, 0.25)
        x = x.cos() + 0.1 * x
        small = x.square() - 0.5
        x = small if self.left_out == "choice of values" else torch.where(small > 0.0, small, -0.3 * x.exp())
        x = x if self.left_out == "order" else x[:, self.order]
        x = x.tanh() + x
        x = x if self.left_out == "moved" else x.roll(1, 1)
        x = x.cos() + 1 if self.left_out == "factor" else x.cos() * self.gain + 1
        return x if self.left_out == "shares" else x.log_softmax(-1)


@pytest.mark.parametrize("left_out", ["", *LEFT_OUT])
def test_the_kind_of_what_is_left_out_follows_from_what_it_does(left_out: str, tmp_path: Path) -> None:
    seen = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    x = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(1))
    torch.save({"x": x, "seen": seen}, tmp_path / "x.pt")
    result = check(Whole().eval(), candidate=Whole(left_out).eval(), inputs=str(tmp_path / "x.pt"))
    assert result.ok == (not left_out)
    if result.first_divergence is not None:
        hint = result.first_divergence.hints[0]
        kind, text = LEFT_OUT[left_out]
        assert hint.kind == kind and text in hint.text, hint
