"""Guesses at the kind of mistake, each planted, and none where the error looks like nothing known."""

from __future__ import annotations

import pytest
import torch

from glassengine.compare.hints import tensor_hints, weight_hints


@pytest.fixture
def baseline() -> torch.Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def kinds(baseline: torch.Tensor, candidate: torch.Tensor) -> list[str]:
    return [hint.kind for hint in tensor_hints(baseline, candidate.float(), None)]


def test_scale_sign_and_offset(baseline: torch.Tensor) -> None:
    assert kinds(baseline, baseline * 1.25) == ["scale"]
    assert kinds(baseline, -baseline) == ["sign"]
    assert "offset" in kinds(baseline, baseline + 0.5)


def test_one_slice(baseline: torch.Tensor) -> None:
    candidate = baseline.clone()
    candidate[:, 4] += torch.randn(2, 8)
    hints = tensor_hints(baseline, candidate.float(), None)
    assert [(hint.kind, "index 4 of axis 1" in hint.text) for hint in hints] == [("slice", True)]


def test_no_guess_for_random_errors_or_invalid_elements(baseline: torch.Tensor) -> None:
    assert kinds(baseline, baseline + torch.randn(2, 6, 8)) == []
    valid = torch.zeros(2, 6, 8, dtype=torch.bool)
    assert tensor_hints(baseline, (baseline * 2).float(), valid) == []


def test_weights(baseline: torch.Tensor) -> None:
    ours = {"a": torch.ones(3, 4), "b": torch.arange(12.0).reshape(3, 4)}
    assert weight_hints(["a", "b"], ours, {name: value.clone() for name, value in ours.items()}) == []
    (hint,) = weight_hints(["a"], ours, {"a": ours["b"].clone(), "b": ours["b"]})
    assert "12 of 12" not in hint.text and "equals the baseline's b" in hint.text
    (hint,) = weight_hints(["a"], ours, {"a": torch.ones(4, 3)})
    assert "shape (4, 3), baseline (3, 4)" in hint.text


def test_a_weight_that_is_only_rounded_is_no_hint() -> None:
    ours = {"a": torch.randn(3, 4)}
    assert weight_hints(["a"], ours, {"a": ours["a"].bfloat16()}) == []
