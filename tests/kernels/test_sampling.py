"""Samplers are judged by the chi-square test."""

from __future__ import annotations

import pytest
import torch

import glassengine as glass
from glassengine.errors import UsageError


def test_samples() -> None:
    p = torch.tensor([0.5, 0.25, 0.2, 0.05, 0.0])
    generator = torch.Generator().manual_seed(0)

    def drawn(q: torch.Tensor, number: int = 4000) -> torch.Tensor:
        return torch.multinomial(q, number, replacement=True, generator=generator)

    assert glass.testing.assert_samples_match(drawn(p), p) > 1e-6
    with pytest.raises(AssertionError, match="not this distribution"):
        glass.testing.assert_samples_match(drawn(torch.tensor([0.4, 0.35, 0.2, 0.05, 0.0])), p)
    with pytest.raises(AssertionError, match="no chance"):
        glass.testing.assert_samples_match(drawn(torch.tensor([0.5, 0.25, 0.2, 0.04, 0.01])), p)
    with pytest.raises(AssertionError, match="outside"):
        glass.testing.assert_samples_match(torch.tensor([7]), p)
    with pytest.raises(UsageError, match="too few"):
        glass.testing.assert_samples_match(torch.tensor([1, 2]), p)


@pytest.mark.parametrize("probabilities", [[float("nan"), 1.0], [-1.0, 2.0], [0.0, 0.0], [float("inf"), 1.0]])
def test_invalid_distributions_are_refused(probabilities: list[float]) -> None:
    with pytest.raises(UsageError, match="not a distribution"):
        glass.testing.assert_samples_match(torch.zeros(100, dtype=torch.int64), torch.tensor(probabilities))
