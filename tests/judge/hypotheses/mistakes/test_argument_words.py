"""What kind of mistake it is that an op has another argument, told of whole modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check

WRONG = {
    "late": ("position", "arange(6, False) in the baseline, arange(1, 7, False) in the candidate"),
    "ahead": ("position", "start of slice: 0 in the baseline, -6"),
    "halves": ("swapped", "are exchanged"),
    "norm again": ("swapped", "instead of"),
}


class Net(nn.Module):
    """x [2, 6, 8]: positions, a convolution that looks back, two halves, a residual."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.conv, self.out = nn.Conv1d(8, 8, 3, padding=2), nn.Linear(4, 8)
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(torch.arange(1, 7) if self.mistake == "late" else torch.arange(6))
        y = self.conv(self.norm(x).transpose(1, 2))
        y = (y[:, :, -6:] if self.mistake == "ahead" else y[:, :, :6]).transpose(1, 2)
        a, b = y[..., :4], y[..., 4:]
        if self.mistake == "halves":
            a, b = b, a
        return self.out(a.tanh() * torch.sigmoid(b)) + (self.norm(x) if self.mistake == "norm again" else x)


@pytest.mark.parametrize("mistake", WRONG)
def test_the_kind_follows_from_what_the_argument_means(mistake: str, tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    first = check(Net().eval(), candidate=Net(mistake).eval(), inputs=str(tmp_path / "x.pt")).first_divergence
    assert first is not None and first.hints, mistake
    kind, text = WRONG[mistake]
    assert first.hints[0].kind == kind and text in first.hints[0].text, first.hints[0]


MISSING = {
    "not turned over": ("scale", "pow is missing"),
    "in logarithms": ("activation", "exp is missing"),
    "another grid": ("position", "start of linspace"),
    "along rows": ("transposed", "dim of cumsum"),
}


class Spread(nn.Module):
    """x [2, 5, 5]: sums of it, spread by numbers between two ends."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        spread = torch.linspace(-0.5 if self.mistake == "another grid" else -1.0, 2.0, 5)
        sums = (0.1 * x).cumsum(1 if self.mistake == "along rows" else 2)
        grown = sums + spread if self.mistake == "in logarithms" else (sums + spread).exp()
        size = x.square().sum(-1, keepdim=True) + 1.5
        return grown * size if self.mistake == "not turned over" else grown * size**-1


@pytest.mark.parametrize("mistake", MISSING)
def test_the_kind_follows_from_what_the_op_does(mistake: str, tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    first = check(Spread(), candidate=Spread(mistake), inputs=str(tmp_path / "x.pt")).first_divergence
    assert first is not None and first.hints, mistake
    kind, text = MISSING[mistake]
    assert first.hints[0].kind == kind and text in first.hints[0].text, first.hints[0]


class Waves(nn.Module):
    """Sines of time [B], of frequencies that fall from one to another; scores that are activated and divided."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake

    def forward(self, time: Tensor) -> Tensor:
        fall = 9.0 / (4 if self.mistake == "one more" else 3)
        waves = time[:, None] * torch.exp(torch.arange(4) * -fall)
        scores = torch.cat([waves.sin(), waves.cos()], -1)
        return scores.softmax(-1) if self.mistake == "softmax" else nn.functional.silu(scores) / 5.0


@pytest.mark.parametrize(("mistake", "kind"), [("one more", "position"), ("softmax", "activation")])
def test_steps_of_a_grid_and_one_op_for_several(mistake: str, kind: str, tmp_path: Path) -> None:
    torch.save({"time": torch.tensor([0.3, 2.0, 40.0])}, tmp_path / "x.pt")
    first = check(Waves(), candidate=Waves(mistake), inputs=str(tmp_path / "x.pt")).first_divergence
    assert first is not None and first.hints, mistake
    assert first.hints[0].kind == kind and first.hints[0].proven, first.hints[0]


class Behind(nn.Module):
    """A convolution over what is padded on one side."""

    def __init__(self, *pad: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.pad = nn.Conv1d(8, 8, 3), pad

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(nn.functional.pad(x, *self.pad)).tanh()


def test_an_argument_that_changes_nothing_is_not_told() -> None:
    models = Behind((2, 0), "constant", 0), Behind((1, 1))
    first = check(models[0].eval(), candidate=models[1].eval(), inputs={"x": torch.randn(2, 8, 9)}).first_divergence
    assert first is not None and first.hints[0].proven
    assert first.hints[0].text == "pad of pad: [2, 0] in the baseline, [1, 1] in the candidate"
