"""Positions per row are another legal way to write a rotation, and hide no mistake behind them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import glassengine as glass


class Rows(nn.Module):
    """A language model without a cache, whose positions may begin at the first token of each row."""

    def __init__(self, *, counts: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=64, num_hidden_layers=2, initializer_range=0.3, **sizes)
        self.model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
        self.model.model.layers[1].self_attn.scaling *= scale
        self.counts = counts

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        positions = {"position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0)} if self.counts else {}
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions)
        logits: Tensor = found.logits
        return logits


@pytest.mark.parametrize(("num_rows", "scale", "text"), [(3, 1.0, None), (2, 1.0, None), (3, 1.1, "factor of mul")])
def test_f73_what_stands_behind_positions_per_row_is_named(num_rows: int, scale: float, text: str | None) -> None:
    ids = torch.tensor([[0, 0, 0, 9, 2, 7, 1, 8], [3, 4, 5, 6, 7, 8, 9, 10], [0, 5, 6, 6, 7, 8, 33, 10]])[:num_rows]
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    found = glass.check(Rows().eval(), candidate=Rows(counts=True, scale=scale).eval(), inputs=[inputs])
    first = found.first_divergence
    assert found.ok == (text is None) and (first is None) == (text is None)
    if first is not None and text is not None:
        assert "layers.1" in first.site and first.hints[0].proven and first.hints[0].text.startswith(text)
