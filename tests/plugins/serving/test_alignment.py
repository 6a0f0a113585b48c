"""Gains of norms: which of them a checkpoint stores without their 1."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from glassengine.errors import UnknownNameError, UsageError
from glassengine.plugins.serving.alignment import adds_one, layouts, numbers_of, table_of

CONFIG = SimpleNamespace(
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=128,
    rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5},
)
ARCHITECTURES = (
    *("llama", "smollm3", "granite", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "olmo2"),
    *("starcoder2", "stablelm", "gpt2", "bert"),
)


def test_numbers_of_a_checkpoint() -> None:
    found = numbers_of(CONFIG)
    assert (found["head_dim"], found["rotated"], found["q_width"], found["kv_width"]) == (16, 8, 64, 32)
    assert found["experts"] is None
    with pytest.raises(UsageError, match="names no heads"):
        numbers_of(SimpleNamespace())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_table_is_a_map(architecture: str) -> None:
    table = table_of("ggml", architecture, numbers_of(CONFIG))
    assert all(rule.is_optional for rule in table.weights)
    assert table.rules is not None or architecture == "bert"


def test_numbers_are_filled_in() -> None:
    table = table_of("ggml", "llama", numbers_of(CONFIG))
    rule = next(rule for rule in table.weights if "q_proj.weight" in rule.baseline)
    assert dict(rule.candidate_ops[0].arguments) == {"dim": 0, "width": 16, "rotated": 8}


def test_models_without_a_table_are_named() -> None:
    assert layouts() == ["executorch", "ggml", "onnx", "openvino", "sglang", "vllm"]
    with pytest.raises(UnknownNameError, match="unknown layout 'lmdeploy'"):
        table_of("lmdeploy", "llama", {})
    with pytest.raises(UnknownNameError, match="'lama'") as found:
        table_of("ggml", "lama", {})
    assert "llama" in str(found.value)


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
