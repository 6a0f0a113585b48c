"""Adapters that peft itself writes: merged here they compute what peft computes, or they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from glassengine.errors import UsageError
from glassengine.program.loading import adapters

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LORA: dict[str, tuple[str, dict[str, Any]]] = {
    "two products": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "rank-stabilized": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "dora": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "dora of a table": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "table and head": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "dora, transposed": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "k_proj"],
            "rank_pattern": {"q_proj": 8},
            "alpha_pattern": {"layers.1.self_attn.k_proj": 32},
        },
    ),
    "biases": ("llama", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "a whole module": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "parameters": ("LoraConfig", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate_proj.weight"]}),
    "rows of a table": ("LoraConfig", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 3]}),
    "layers twice": ("LoraConfig", {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 2]]}),
    "base changed": ("LoraConfig", {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}),
    "loha": ("LoHaConfig", {"target_modules": ["q_proj"]}),
    "lokr": ("LoKrConfig", {"target_modules": ["q_proj"]}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj"], "feedforward_modules": []}),
    "oft": ("OFTConfig", {"target_modules": ["q_proj"], "oft_block_size": 4, "r": 0}),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "prompts": ("PromptTuningConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}),
}


def base(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 32}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64, **heads)
    return LlamaForCausalLM(config).eval()


def trained(family: str, config: Any, folder: Path) -> torch.Tensor:
    """Save an adapter whose every parameter was moved, and return the logits that peft computes with it."""
    model = peft.get_peft_model(base(family), config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        model.save_pretrained(folder)
        return model(input_ids=torch.arange(8)[None]).logits


@pytest.mark.parametrize("name", LORA)
def test_merged_as_peft_computes(name: str, tmp_path: Path) -> None:
    family, settings = LORA[name]
    wanted = trained(family, peft.LoraConfig(**{"r": 4, **settings}), tmp_path)
    own = base(family)
    with torch.no_grad():
        before = own(input_ids=torch.arange(8)[None]).logits
        adapters.merge(own, adapters.read_adapter(tmp_path))
        merged = own(input_ids=torch.arange(8)[None]).logits
    assert not torch.allclose(before, wanted, atol=1e-3), "the adapter changes nothing"
    torch.testing.assert_close(merged, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_helps(name: str, tmp_path: Path) -> None:
    kind, settings = REFUSED[name]
    trained("llama", getattr(peft, kind)(**settings), tmp_path)
    with pytest.raises(UsageError, match="cannot be merged") as refused:
        adapters.read_adapter(tmp_path)
    assert "merge_and_unload" in str(refused.value)
