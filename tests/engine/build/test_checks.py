"""An engine whose program would generate something else than the model is not built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.engine.build.checks import require_agreement
from glassengine.errors import UsageError
from glassengine.program import Program, load_model
from glassengine.program.export.export import export_causal_lm
from glassengine.testing import models

_GPT_NEO = {
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 64,
    "window_size": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _gpt_neo(kinds: list[str]) -> Any:
    settings = {**_GPT_NEO, "attention_types": [[kinds, 1]]}
    return models.from_config("GPTNeoForCausalLM", "GPTNeoConfig", settings)


def test_a_window_that_is_counted_from_the_end_of_the_cache(tmp_path: Path) -> None:
    # Its local attention cuts its mask by the length of the cache, which is that of the text in transformers alone.
    with pytest.raises(UsageError, match=r"would not generate[\s\S]*glass check .* names the operation"):
        glass.build(_gpt_neo(["global", "local"]), tmp_path / "engine", backend="eager")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_check_does_not_ask_and_tells_where() -> None:
    found = glass.check(_gpt_neo(["global", "local"]), backend="eager", steps=1)
    assert found.first_divergence is not None
    assert found.first_divergence.site.startswith("transformer.h.1.attn")


def test_rounding_is_no_reason() -> None:
    # Rounding to bfloat16 is large, and may choose another expert.
    model = load_model(models.mixtral(), dtype="bfloat16")
    program = export_causal_lm(model.module, metadata=model.metadata)
    require_agreement(model, program, 96)
    _spoil(program)
    with pytest.raises(UsageError, match="would not generate"):
        require_agreement(model, program, 96)


def _spoil(program: Program) -> None:
    """Add two values of the first layer instead of multiplying them."""
    node = next(
        node for node in program.graph.nodes if node.target is torch.ops.aten.mul.Tensor and len(node.args) == 2
    )
    assert isinstance(node.args[1], torch.fx.Node)
    node.target = torch.ops.aten.add.Tensor
    program.exported.graph_module.recompile()


def test_a_model_that_counts_its_positions_anew_in_each_step_is_told_them() -> None:
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
    }
    model = load_model(models.from_config("BambaForCausalLM", "BambaConfig", settings))
    require_agreement(model, export_causal_lm(model.module, metadata=model.metadata), 32)
