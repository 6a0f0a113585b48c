"""Guesses at the kind of mistake, each planted, and none where the error looks like nothing known."""

from __future__ import annotations

import pytest
import torch

from glassengine.numerics.hints import tensor_hints


@pytest.fixture
def baseline() -> torch.Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def kinds(baseline: torch.Tensor, candidate: torch.Tensor) -> list[str]:
    return [hint.kind for hint in tensor_hints(baseline, candidate.float(), None)]


def test_scale_sign_and_offset(baseline: torch.Tensor) -> None:
    assert kinds(baseline, baseline * 1.25) == ["scale"]
    assert kinds(baseline, -baseline) == ["scale"]
    assert "other" in kinds(baseline, baseline + 0.5)


def test_one_slice(baseline: torch.Tensor) -> None:
    candidate = baseline.clone()
    candidate[:, 4] += torch.randn(2, 8)
    hints = tensor_hints(baseline, candidate.float(), None)
    assert [(hint.kind, "index 4 of axis 1" in hint.text) for hint in hints] == [("other", True)]


def test_no_guess_for_random_errors_or_invalid_elements(baseline: torch.Tensor) -> None:
    assert kinds(baseline, baseline + torch.randn(2, 6, 8)) == []
    valid = torch.zeros(2, 6, 8, dtype=torch.bool)
    assert tensor_hints(baseline, (baseline * 2).float(), valid) == []
