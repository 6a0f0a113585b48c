"""Masks that hide with other numbers are no mistake, in a port and in an engine of it; one that hides less is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check
from glassengine.engine.build.build import build_program
from glassengine.program import export_program, load_inputs, load_model

LARGEST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """Scores with a mask that is made of the numbers of tokens, its own way."""

    def __init__(self, hidden: float, *, seen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.out = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(9, 5)
        self.hidden, self.seen = hidden, seen

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        place = torch.arange(9)
        later = place[None, :] > place[:, None] + self.seen
        mask = torch.zeros(9, 9).masked_fill(later, self.hidden) + (1 - real)[:, None, :] * max(self.hidden, LARGEST)
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return self.out(torch.softmax(scores + mask, -1))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("inputs") / "inputs.pt"
    real = torch.ones(2, 9)
    real[1, 5:] = 0
    torch.save({"x": torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1)), "real": real}, path)
    return str(path)


@pytest.mark.parametrize("hidden", [-1e4, -1e9, float("-inf"), LARGEST])
def test_any_number_that_hides_is_as_good(hidden: float, inputs: str) -> None:
    result = check(Attention(LARGEST).eval(), candidate=Attention(hidden).eval(), inputs=inputs)
    assert result.ok and result.verdict in ("identical", "rounding"), result.not_ok_because


def test_so_it_is_in_an_engine(inputs: str, tmp_path: Path) -> None:
    port = load_model(Attention(-1e9).eval())
    build_program(export_program(port, inputs=load_inputs(inputs)), tmp_path / "engine", backend="eager")
    result = check(Attention(LARGEST).eval(), candidate=tmp_path / "engine", inputs=inputs)
    assert result.ok and result.verdict in ("identical", "rounding"), result.not_ok_because


def test_a_mask_that_hides_less_is_named(inputs: str) -> None:
    result = check(Attention(LARGEST).eval(), candidate=Attention(-1e9, seen=1).eval(), inputs=inputs)
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.site in ("./masked_fill.0", "./add.0", "./add.1")


def test_a_number_that_hides_nothing_is_wrong(inputs: str) -> None:
    result = check(Attention(LARGEST).eval(), candidate=Attention(-1.0).eval(), inputs=inputs)
    assert not result.ok


@pytest.mark.parametrize("hidden", [-1e4, -1e30, float("-inf"), LARGEST])
def test_f44_a_baseline_that_writes_numbers_takes_any_other_as_well(hidden: float, inputs: str) -> None:
    result = check(Attention(-1e9).eval(), candidate=Attention(hidden).eval(), inputs=inputs)
    assert result.ok and result.verdict in ("identical", "rounding"), result.not_ok_because
    assert not check(Attention(-1e9).eval(), candidate=Attention(hidden, seen=1).eval(), inputs=inputs).ok


class Half(nn.Module):
    """Scores in float16, masked there or in float32 before they are rounded."""

    def __init__(self, *, wide: bool, seen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.out = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(9, 5)
        self.wide, self.seen = wide, seen

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        hidden = torch.ones(9, 9, dtype=torch.bool).triu(1 + self.seen)
        if self.wide:
            scores = torch.where(hidden, torch.finfo(torch.float32).min, scores.float())
        else:
            scores = torch.where(hidden, torch.finfo(torch.float16).min, scores).float()
        return self.out(torch.softmax(scores, -1).half())


@pytest.mark.parametrize("seen", [0, 1])
def test_f44_a_mask_in_registers_of_float32_hides_as_one_of_float16(seen: int, tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1)).half()}, tmp_path / "x.pt")
    other = Half(wide=True, seen=seen).half().eval()
    result = check(Half(wide=False).half().eval(), candidate=other, inputs=str(tmp_path / "x.pt"))
    assert result.ok is (seen == 0), result.not_ok_because


class Large(nn.Module):
    """Scores that are themselves as small as what hides: their size is what is compared."""

    def __init__(self, *, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.out, self.shift = nn.Linear(12, 9), nn.Linear(9, 5), shift

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) * 4000 - 20000 * self.query.bias.abs().sum()
        return self.out(torch.softmax(scores + self.shift * torch.arange(9.0), -1))


def test_scores_are_no_mask_for_being_small(tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    assert check(Large().eval(), candidate=Large().eval(), inputs=str(tmp_path / "x.pt")).ok
    assert not check(Large().eval(), candidate=Large(shift=500.0).eval(), inputs=str(tmp_path / "x.pt")).ok
