"""The answer of `glass check` fits one screen, however much there is to say."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from rich.console import Console
from torch import nn

import glassengine as glass
from glassengine.report.terminal_check import check
from glassengine.results import Comparison, Hint, Skipped
from glassengine.testing import models


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.up(x))


class Port(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.up(x) * 1.05)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    path = tmp_path_factory.mktemp("inputs") / "x.pt"
    torch.save({"x": torch.ones(2, 8)}, path)
    port = models.drawn(Net)
    port.__class__ = Port
    return glass.check(models.drawn(Net), candidate=port, inputs=str(path))


def screen(result: Comparison) -> list[str]:
    console = Console(file=io.StringIO(), width=100, markup=False, highlight=False)
    console.print(check(result))
    return console.file.getvalue().rstrip("\n").split("\n")  # type: ignore[attr-defined, no-any-return]


def test_it_names_both_sides_of_the_first_divergence(found: Comparison) -> None:
    text = "\n".join(screen(found))
    assert "first divergence: ./silu.0" in text
    assert found.first_divergence is not None
    assert found.first_divergence.source is not None and "silu(self.up(x))" in found.first_divergence.source
    assert found.first_divergence.candidate_source is not None
    assert "self.up(x) * 1.05" in found.first_divergence.candidate_source
    # Long lines are wrapped.
    assert "self.up(x)*1.05" in "".join(text.split())
    assert "baseline Net, candidate Port" in text


def test_it_fits_a_screen_of_24_rows(found: Comparison) -> None:
    first = found.first_divergence
    assert first is not None
    hints = tuple(Hint("scale", f"a guess number {i} " + "of some length " * 5, 0.5) for i in range(9))
    others = tuple(dataclasses.replace(first, site=f"layers.{i}.mlp/mul.0", step=i) for i in range(9))
    skipped = tuple(Skipped(f"s{i}", "candidate", f"reason {i % 7}") for i in range(50))
    crowded = dataclasses.replace(
        found,
        first_divergence=dataclasses.replace(first, hints=hints),
        origins=others,
        skipped=skipped,
        rungs=(*found.rungs, *found.rungs[:1]),
    )
    lines = screen(crowded)
    assert len(lines) <= 24, "\n".join(lines)
    assert all(len(line) <= 100 for line in lines)
    assert any("more lines (--json has all)" in line for line in lines)
    assert len(screen(found)) <= 24
