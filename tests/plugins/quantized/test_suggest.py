"""`--suggest-precision`: the set holds the budget, and is at most 1.5 times the smallest that there is."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.cli.main import main
from glassengine.diagnose.check_model import check
from glassengine.errors import UsageError
from glassengine.plugins.quantized.effects import difference, outcome_of
from glassengine.plugins.quantized.suggest import MixedDtypes, smallest
from glassengine.progress import silent
from glassengine.testing import models
from tests.plugins.quantized.test_check import base as base
from tests.quantized import save_quantized


class Block(nn.Module):
    """A residual block with a norm, and a gate that is a product of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block to the residual."""
        y = self.norm(x)
        return x + self.up(y) * torch.sigmoid(self.gate(y))


class Scaled(nn.Module):
    """Two large products that cancel: only the parts that make them cost anything."""

    def __init__(self) -> None:
        super().__init__()
        self.big, self.same, self.rest = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.same.load_state_dict(self.big.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Subtract what is nearly the same."""
        return 50 * self.big(x) - 49 * self.same(x) + self.rest(x)


def small_models() -> dict[str, nn.Module]:
    """Return five models of at most 11 parts."""
    torch.manual_seed(0)
    return {
        "mlp": nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)),
        "convolutions": nn.Sequential(
            nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1), nn.Flatten()
        ),
        "blocks": nn.Sequential(Block(8), Block(8)),
        "cancels": Scaled(),
        "encoder": nn.Sequential(
            nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1), Block(8)
        ),
    }


@torch.no_grad()
def searched(module: nn.Module, budget: float) -> tuple[int, int | None]:
    """Return the size of the set that is found and the size of the smallest; None where none holds."""
    module = module.eval()
    torch.manual_seed(1)
    forwards: list[dict[str, Any]] = [{"input": torch.randn(4, 8, 8)}]
    if isinstance(module, Scaled):
        forwards = [{"x": torch.randn(4, 8, 8)}]
    expected, mixed = outcome_of(module, forwards), MixedDtypes(module, torch.bfloat16)

    def snr(kept: Iterable[str]) -> float:
        return float(difference(expected, outcome_of(mixed.keeping(kept), forwards))["snr_db"])

    found = smallest(mixed.units, snr, budget, silent)
    if found.at_most < budget:
        return len(found.kept), None
    assert found.snr >= budget
    least = next(
        size
        for size in range(len(mixed.units) + 1)
        if any(snr(kept) >= budget for kept in combinations(mixed.units, size))
    )
    return len(found.kept), least


@pytest.mark.parametrize("name", ["mlp", "cancels"])
def test_as_small_as_exhaustive_search(name: str) -> None:
    for budget in (44.0, 52.0):
        found, least = searched(small_models()[name], budget)
        assert least is not None and found <= 1.5 * least


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "convolutions", "blocks", "cancels", "encoder"])
def test_as_small_as_exhaustive_search_over_budgets(name: str) -> None:
    sizes = [searched(small_models()[name], budget) for budget in range(36, 64, 2)]
    assert all(least is not None and found <= 1.5 * least for found, least in sizes)


def test_everything_kept_is_the_baseline_bit_for_bit() -> None:
    model: Any = models.llama()
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        mixed = MixedDtypes(model, torch.bfloat16)
        assert torch.equal(mixed.keeping(mixed.units)(input_ids=ids).logits, model(input_ids=ids).logits)
        coarse = mixed.keeping(())(input_ids=ids).logits
        assert torch.equal(coarse, model.to(torch.bfloat16)(input_ids=ids).logits)


def test_a_model_keeps_its_budget(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = check(base, dtype="bfloat16", min_snr=48, steps=0, suggest_precision=True)
    assert result.ok and (result.drift[-1].snr_db or 0) >= 48
    assert result.notes[0].startswith("keep ")
    words = ["check", str(base), "--dtype", "bfloat16", "--steps", "0", "--suggest-precision", "--min-snr"]
    assert main([*words, "20dB"]) == 0
    printed = capsys.readouterr().out
    assert "nothing has to stay in float32" in printed and "identical" not in printed.splitlines()[0]


def test_layers_of_a_checkpoint_are_left_unquantized(base: Path, tmp_path: Path) -> None:
    save_quantized(models.llama(), tmp_path / "candidate", "gptq")
    plain = check(base, candidate=tmp_path / "candidate", steps=0)
    budget = (plain.drift[-1].snr_db or 0) + 2
    result = check(base, candidate=tmp_path / "candidate", steps=0, min_snr=budget, suggest_precision=True)
    assert result.ok and (result.drift[-1].snr_db or 0) >= budget
    assert any(note.startswith("keep ") and " unquantized: model.layers." in note for note in result.notes)
    assert any("gptq: dynamic=" in note for note in result.notes)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float32", "min_snr": 40},
        {"dtype": "bfloat16", "min_snr": 40, "candidate": nn.Linear(2, 2)},
    ],
)
def test_what_is_not_meant_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--suggest-precision"):
        check(nn.Linear(2, 2), suggest_precision=True, **options)
