"""Tiny models of the sizes that kernels of serving engines take: heads of 32 numbers.

`save_small` is the same checkpoint wherever it is made, so a recording of it can be judged without the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glassengine.testing import models
from glassengine.testing.checkpoints import save_checkpoint

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 272,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "vocab_size": 272}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 32}),
    "phi3": ("Phi3", {}),
    "gemma3": ("Gemma3Text", {"query_pre_attn_scalar": 32, "sliding_window": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS),
    "gpt2": ("GPT2", _GPT2),
}
"""Name -> the class's in transformers, and what differs in its configuration."""


def save_small(name: str, folder: Path) -> Path:
    """Write the checkpoint of one of `SMALL`; return its directory."""
    base, changes = SMALL[name]
    if name == "gpt2":
        module = models.from_config("GPT2LMHeadModel", "GPT2Config", {**changes, "bos_token_id": 1, "eos_token_id": 2})
    else:
        language = base.removesuffix("Text")
        module = models.from_config(f"{language}ForCausalLM", f"{base}Config", {**_SIZES, **changes})
    save_checkpoint(module, folder)
    return folder
