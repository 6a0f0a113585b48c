"""Slices that moved and tensors that were taken for others are named, from two records alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from glassengine.compare.compare import compare
from glassengine.results import Hint

Weights = dict[str, Tensor]


def weights() -> Weights:
    generator = torch.Generator().manual_seed(0)
    names = [f"{layer}.{part}.weight" for layer in range(2) for part in ("q", "k", "gate", "up")]
    return {**{name: torch.randn(32, 32, generator=generator) for name in names}, "norm.weight": torch.ones(32)}


def hints(change: Callable[[Weights], Weights], folder: Path) -> tuple[Hint, ...]:
    right = weights()
    save_file(right, folder / "right.safetensors")
    made = {name: value.contiguous().clone() for name, value in {**right, **change(right)}.items()}
    save_file(made, folder / "made.safetensors")
    first = compare(folder / "right.safetensors", folder / "made.safetensors").first_divergence
    assert first is not None
    return first.hints


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            lambda w: {"0.q.weight": w["0.q.weight"].view(4, 2, 4, 32).transpose(1, 2).reshape(32, 32)},
            "permuted",
            "rows in another order: interleaved halves of heads of 8",
        ),
        (
            lambda w: {"0.q.weight": w["0.q.weight"].view(4, 8, 32).flip(0).reshape(32, 32)},
            "permuted",
            "blocks of 8 as",
        ),
        (lambda w: {"0.q.weight": w["0.q.weight"].T}, "transposed", "transposed (axes 0 and 1)"),
        (
            lambda w: {"1.gate.weight": w["1.up.weight"], "1.up.weight": w["1.gate.weight"]},
            "swapped",
            "1.gate.weight and 1.up.weight are exchanged",
        ),
        (lambda w: {"1.k.weight": w["0.k.weight"]}, "swapped", "it holds 0.k.weight"),
        (lambda w: {"1.k.weight": w["0.k.weight"].half()}, "swapped", "it holds 0.k.weight"),
    ],
)
def test_mistakes_of_a_conversion_are_proven(
    change: Callable[[Weights], Weights], kind: str, text: str, tmp_path: Path
) -> None:
    (hint,) = hints(change, tmp_path)
    assert (hint.kind, hint.proven, hint.evidence) == (kind, True, "values") and text in hint.text


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {"0.q.weight": w["0.q.weight"] + 0.01 * w["0.k.weight"]},
        lambda w: {"0.q.weight": w["0.q.weight"].T + 0.05 * w["0.k.weight"]},
        lambda w: {"norm.weight": 1 + 0.1 * w["0.k.weight"][0]},
        lambda w: {"0.q.weight": torch.full((32, 32), torch.nan)},
    ],
)
def test_nothing_is_said_of_what_nothing_makes(change: Callable[[Weights], Weights], tmp_path: Path) -> None:
    assert hints(change, tmp_path) == ()
