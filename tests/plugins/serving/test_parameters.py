"""Gains of norms: which of them a checkpoint stores without their 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from glassengine.plugins.serving.parameters import adds_one


class Own(nn.Module):
    """A norm as another library might write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (8,)) * (1 + self.gain)


@pytest.mark.parametrize(
    ("norm", "name", "expected"),
    [
        (Gemma2RMSNorm(8), "weight", True),
        (NemotronLayerNorm1P(8), "weight", True),
        (NemotronLayerNorm1P(8), "bias", False),
        (Own(), "gain", True),
        (LlamaRMSNorm(8), "weight", False),
        (nn.LayerNorm(8), "weight", False),
        (nn.LayerNorm(8), "bias", False),
        (nn.Linear(8, 8), "bias", False),
    ],
)
def test_f80_gains_without_their_1_are_found(norm: nn.Module, name: str, expected: bool) -> None:
    assert adds_one(nn.ModuleDict({"norm": norm}), f"norm.{name}") is expected
