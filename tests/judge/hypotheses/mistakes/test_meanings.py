"""What a step reads of the one before it: a state that is not carried on, or is read before it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check

WRONG = {"": "", "lost": "stale", "read before": "stale", "another": "swapped"}


class Remembers(nn.Module):
    """A state [2, 6] that decays, to which each step adds what it is given."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.new, self.out, self.mistake = nn.Linear(4, 6), nn.Linear(6, 6), mistake
        self.register_buffer("state", torch.zeros(2, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        before, new = self.state * 0.9, self.new(x).tanh()
        after = new if self.mistake == "lost" else before + new
        read = {"read before": before, "another": new}.get(self.mistake, after)
        self.state.copy_(after)
        return self.out(read.sin())


@pytest.mark.parametrize("mistake", WRONG)
def test_what_is_of_the_step_before_is_stale(mistake: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    torch.save([{"x": torch.randn(2, 4, generator=generator)} for _ in range(3)], tmp_path / "x.pt")
    result = check(Remembers(), candidate=Remembers(mistake), inputs=str(tmp_path / "x.pt"))
    assert result.ok == (not mistake)
    if result.first_divergence is not None:
        hint = result.first_divergence.hints[0]
        assert hint.kind == WRONG[mistake] and hint.proven, hint


class Unrolled(nn.Module):
    """Three steps over x [2, 3, 4], of which each reads the state that the one before it made."""

    def __init__(self, *, is_lost: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.is_lost = nn.Linear(10, 6), is_lost

    def forward(self, x: Tensor) -> Tensor:
        first = state = torch.zeros(2, 6)
        made = []
        for step in range(3):
            state = self.cell(torch.cat([x[:, step], first if self.is_lost else state], 1)).tanh()
            made.append(state)
        return torch.stack(made, 1)


def test_a_state_that_stays_what_it_was_before_the_first_step_is_stale(tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    first = check(Unrolled(), candidate=Unrolled(is_lost=True), inputs=str(tmp_path / "x.pt")).first_divergence
    assert first is not None and first.hints[0].kind == "stale", first
