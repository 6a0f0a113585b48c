"""Tiny checkpoints with a tokenizer, as `save_pretrained` writes them: what `glass build` is tested with.

Tiny models of the sizes that kernels of serving engines take: heads of 32 numbers.

`save_small` is the same checkpoint wherever it is made, so a recording of it can be judged without the engine.

Folders as the model builder of onnxruntime-genai makes them, of checkpoints on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from glassengine.testing import models

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
"""Special tokens, then one token per byte."""


def byte_tokenizer(*extra_tokens: str) -> Any:
    """Return a tokenizer of transformers with one token per byte, so that any text survives a round trip.

    Args:
        *extra_tokens: More words, which make it a tokenizer of another vocabulary.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as tokenizer_models
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *extra_tokens]
    tokenizer = Tokenizer(tokenizer_models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, start, end = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=start, eos_token=end)


def save_checkpoint(model: nn.Module, directory: Path, *, tokenizer: bool = True) -> Path:
    """Write a model of transformers, and the byte tokenizer, into `directory`; return it."""
    saved: Any = model
    saved.save_pretrained(directory)
    if tokenizer:
        byte_tokenizer().save_pretrained(directory)
    return directory


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
