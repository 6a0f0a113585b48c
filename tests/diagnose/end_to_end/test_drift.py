"""Drift: a less precise candidate gets a table of where the signal is lost, and its mistakes are still mistakes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import glassengine as glass
from glassengine.numerics.drift import DriftSums, by_growth, shared
from glassengine.report.terminal_check import check
from glassengine.results import Comparison
from glassengine.testing import models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(self.up(self.norm(x))))

    def inner(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


class WrongBlock(Block):
    def inner(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x)


def half(*, wrong: bool = False) -> nn.Module:
    port = models.drawn(Net)
    if wrong:
        port.blocks[1].__class__ = WrongBlock
    return port.to(torch.bfloat16)


def checked(tmp_path: Path, candidate: nn.Module, **options: Any) -> Comparison:
    torch.save({"x": torch.randn(4, 16, generator=torch.Generator().manual_seed(0))}, tmp_path / "x.pt")
    return glass.check(models.drawn(Net), candidate=candidate, inputs=str(tmp_path / "x.pt"), **options)


def test_f15_half_precision_against_float32_has_a_table_results_last(tmp_path: Path) -> None:
    result = checked(tmp_path, half())
    assert result.ok, result.not_ok_because
    names = [row.site for row in result.drift]
    assert names[0] == "blocks.0.norm" and names[-1] == "logits"
    assert names.index("blocks.0") < names.index("blocks.1.norm") < names.index("blocks.1")
    last = result.drift[-1]
    assert last.kind == "result" and 30 < last.snr_db < 70 and 0.999 < last.cosine_similarity < 1
    inner = [row for row in result.drift if row.kind == "module"]
    assert sum(row.share or 0 for row in inner) == pytest.approx(1.0)
    assert all(row.introduced_db is not None and row.introduced_db > 30 for row in inner)
    assert result.to_dict()["drift"][-1]["site"] == "logits"
    console = Console(file=io.StringIO(), width=100)
    console.print(check(result))
    assert "drift, in order of execution" in console.file.getvalue()  # type: ignore[attr-defined]


def test_f15_a_budget_decides_where_one_is_given(tmp_path: Path) -> None:
    assert checked(tmp_path, half(), min_snr=30.0).ok
    strict = checked(tmp_path, half(), min_snr=80.0)
    assert not strict.ok and strict.standing == "over budget" and not strict.too_little
    assert "--min-snr 80dB" in str(strict.not_ok_because)


def test_f15_a_mistake_does_not_hide_behind_the_precision(tmp_path: Path) -> None:
    result = checked(tmp_path, half(wrong=True), min_snr=1.0)
    assert not result.ok and result.standing == "results differ"
    assert result.first_divergence is not None and "blocks.1" in result.first_divergence.site
    shares = {row.site: row.share or 0 for row in result.drift}
    assert max(shares, key=lambda site: shares[site]).startswith("blocks.1")


def test_of_one_precision_the_table_is_there_where_it_is_asked_for(tmp_path: Path) -> None:
    assert checked(tmp_path, models.drawn(Net)).drift == ()
    rows = checked(tmp_path, models.drawn(Net), drift=True).drift
    assert rows and all(row.snr_db == float("inf") for row in rows)


def test_sums_over_steps_are_those_of_all_of_it() -> None:
    b = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    c = b + 0.01 * torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    whole, parts = DriftSums(), DriftSums()
    whole.add(b, c)
    for one, other in zip(b.split(2), c.split(2), strict=True):
        parts.add(one, other)
    assert parts.row("a", "a", "op").snr_db == pytest.approx(whole.row("a", "a", "op").snr_db)
    expected = float(10 * torch.log10(b.double().square().sum() / (c.double() - b.double()).square().sum()))
    assert whole.row("a", "a", "op").snr_db == pytest.approx(expected)


def test_mask_values_are_no_signal() -> None:
    low, high = torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min
    sums = DriftSums()
    sums.add(torch.tensor([1.0, high]), torch.tensor([1.0, low], dtype=torch.bfloat16))
    assert sums.row("mask", "mask", "op").snr_db == float("inf")


def test_without_predictions_a_row_introduces_what_the_noise_grows_by() -> None:
    def row(site: str, loss: float) -> Any:
        return DriftSums(1, 1.0, loss, 1.0 + loss, 1.0).row(site, site, "module")

    rows = by_growth([row("a", 0.01), row("b", 0.005), row("c", 0.04)])
    assert [round(one.share or 0, 6) for one in rows] == [0.25, 0.0, 0.75]
    assert shared([]) == ()
