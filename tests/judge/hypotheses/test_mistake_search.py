"""A term that is added in another place is not said to be missing; one that is nowhere is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check


class Net(nn.Module):
    """x [2, 6, 8]: a term of a sum, a norm, a product."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.term, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        y = x if self.mistake else x + self.term(x).tanh()
        y = self.head(self.norm(y))
        return y * self.term(x).tanh().exp() if self.mistake == "elsewhere" else y


@pytest.mark.parametrize(("mistake", "is_said"), [("nowhere", True), ("elsewhere", False)])
def test_what_the_candidate_reads_elsewhere_is_not_said_to_be_left_out(
    mistake: str, is_said: bool, tmp_path: Path
) -> None:
    torch.save({"x": torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    result = check(Net().eval(), candidate=Net(mistake).eval(), inputs=str(tmp_path / "x.pt"))
    first = result.first_divergence
    assert first is not None
    said = [hint for hint in first.hints if hint.proven and "is not added" in hint.text]
    assert bool(said) is is_said, first.hints


class Scaled(nn.Module):
    """A layer whose product is scaled twice by one number, or once."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(8, 8), times

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu() * 0.35
        return x + (y * 0.35 if self.times > 1 else y)


def test_the_second_of_two_equal_multiplications_is_said_to_be_missing_in_each_layer() -> None:
    models = []
    for times in (2, 1):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(Scaled(times) for _ in range(3))).eval())
    first = check(models[0], candidate=models[1], inputs={"input": torch.randn(2, 6, 8)}).first_divergence
    assert first is not None and first.site == "0/mul.1" and first.num_alike == 3, first
    assert first.hints[0].text == "the multiplication by 0.35 is missing"


class Around(nn.Module):
    """A layer that is turned around by hand, or not at all."""

    def __init__(self, *, is_turned: bool) -> None:
        super().__init__()
        self.norm, self.conv, self.is_turned = nn.LayerNorm(8), nn.Conv1d(8, 8, 3, padding=1), is_turned

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = torch.cat([y[:, 2:], y[:, :2]], 1) if self.is_turned else y[...]
        return x + self.conv(y.transpose(1, 2)).transpose(1, 2).tanh()


def test_what_one_layer_makes_instead_is_not_said_of_the_ops_of_others() -> None:
    models = []
    for is_turned in (False, True):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(Around(is_turned=is_turned) for _ in range(3))).eval())
    first = check(models[0], candidate=models[1], inputs={"input": torch.randn(2, 7, 8)}).first_divergence
    assert first is not None and first.site == "0/alias.0", first
    assert not any("conv1d" in hint.text or "layer_norm is missing" in hint.text for hint in first.hints), first.hints
