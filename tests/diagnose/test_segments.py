"""Segments: what happens between two observed module outputs is judged from the side's own values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.results import Comparison
from glassengine.testing import models


class Chain(nn.Module):
    """Eight blocks in a row, so that noise builds up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    path = tmp_path / "inputs.pt"
    torch.save({"x": torch.randn(4, 32, generator=torch.Generator().manual_seed(3))}, path)
    return str(path)


def untouched(candidate: nn.Module, inputs: str) -> tuple[Comparison, list[str]]:
    """Return the comparison, and what the untouched rung says the origins are."""
    result = glass.check(models.drawn(Chain), candidate=candidate, inputs=inputs)
    return result, [found.site for found in result.origins if found.rung == "candidate, untouched"]


def test_every_segment_is_judged_by_its_own_inputs(inputs: str) -> None:
    candidate = models.drawn(Chain)
    candidate.blocks[1][0].weight.data[3] *= 2  # type: ignore[index, union-attr, operator]
    candidate.blocks[6][2].eps = 0.03  # type: ignore[index]
    result, origins = untouched(candidate, inputs)
    assert origins == ["blocks.1.0/linear.0", "blocks.6.2"]
    pairs = [pair for pair in result.pairs if pair.rung == "candidate, untouched"]
    assert {pair.judged_by for pair in pairs} == {"segment"}
    # What lies between the two and behind them is clean: it was computed as it should be, from wrong inputs.
    assert sum(pair.verdict == "wrong" and not pair.inherited for pair in pairs) == 2


def test_a_side_that_rounds_otherwise_is_clean(inputs: str) -> None:
    class Halves(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[..., :16] @ self.weight[:, :16].T + x[..., 16:] @ self.weight[:, 16:].T + self.bias

    candidate = models.drawn(Chain)
    for block in candidate.blocks:  # type: ignore[union-attr]
        block[0].__class__ = Halves  # type: ignore[index]
    result, origins = untouched(candidate, inputs)
    assert origins == []
    assert any(pair.verdict == "rounding" and pair.judged_by == "segment" for pair in result.pairs)


def test_the_screen_says_which_guarantee_holds(inputs: str) -> None:
    result, _ = untouched(models.drawn(Chain), inputs)
    assert {rung.name: rung.guarantee for rung in result.rungs} == {
        "program": "judged by segments",
        "candidate": "judged op by op",
        "candidate, untouched": "judged by segments",
    }
