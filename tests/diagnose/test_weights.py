"""Weights of two sides by name, and what a check says of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from glassengine.diagnose import check
from glassengine.diagnose.weights import compare_weights

BASE = {"a.weight": torch.randn(6, 6, generator=torch.Generator().manual_seed(0)), "b": torch.arange(4)}


def different(**changes: torch.Tensor | None) -> tuple[str, ...]:
    candidate = {name: changes.get(name.replace(".", "_"), tensor) for name, tensor in BASE.items()}
    return compare_weights(BASE, {name: t for name, t in candidate.items() if t is not None}).different


def test_copies_casts_transposes_and_roundings_are_the_same() -> None:
    weight = BASE["a.weight"]
    for same in (weight.clone(), weight.bfloat16(), weight.T, weight.double(), weight * (1 + 2.0**-23)):
        assert different(a_weight=same) == ()


def test_one_element_another_shape_and_integers_count() -> None:
    changed = BASE["a.weight"].clone()
    changed[2, 3] *= 1.001
    assert different(a_weight=changed) == ("a.weight",)
    assert different(a_weight=torch.zeros(6, 5)) == ("a.weight",)
    assert different(b=torch.arange(4) + 1) == ("b",)
    assert different(a_weight=torch.full((6, 6), torch.nan)) == ("a.weight",)


def test_what_one_side_alone_has_is_listed() -> None:
    found = compare_weights(BASE, {"b": BASE["b"], "c": torch.zeros(1)})
    assert (found.compared, found.only_baseline, found.only_candidate) == (1, ("a.weight",), ("c",))


def test_a_weight_that_no_prompt_reaches_is_suspicious(llama: nn.Module, token_ids: str) -> None:
    candidate: Any = copy.deepcopy(llama)
    with torch.no_grad():
        candidate.model.embed_tokens.weight[1] *= 2
    result = check(llama, candidate=candidate, inputs=token_ids, steps=0)
    assert result.ok and result.verdict == "suspicious" and result.first_divergence is None
    assert result.weights is not None and result.weights.different == ("model.embed_tokens.weight",)
    assert result.weights.compared > 10
    strict = check(llama, candidate=candidate, inputs=token_ids, steps=0, fail_on="suspicious")
    assert not strict.ok and strict.not_ok_because == "weights differ"
