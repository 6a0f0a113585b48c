"""A port with a planted mistake, for the README: one layer scales its attention scores by a tenth too much."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import AutoModelForCausalLM


def attention_scale() -> nn.Module:
    """Return the bundled model with a wrong attention scale in layer 2."""
    model = AutoModelForCausalLM.from_pretrained(Path(__file__).parent / "tiny-llama")
    model.model.layers[2].self_attn.scaling *= 1.1
    return model
