"""Tiny checkpoints of the model families that are supported, as `save_pretrained` writes them.

`FAMILIES` is the list that the table of docs/families.md is made for. Weights are drawn as in `models`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from glassengine.testing import models
from glassengine.testing.checkpoints import VOCAB_SIZE as NUM_BYTES
from glassengine.testing.checkpoints import save_checkpoint

VOCAB_SIZE = NUM_BYTES + 13
"""Room for the tokens that the tokenizer classes of some families add to the byte tokenizer."""

_TOKENS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER = {**models.ENCODER, **_TOKENS, "num_key_value_heads": 2, "max_position_embeddings": 128}
_TWO_STACKS = {
    **_TOKENS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}


def _made(model: str, config: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: models.from_config(model, config, settings)


def _decoder(name: str, **changes: Any) -> Callable[[], nn.Module]:
    return _made(f"{name}ForCausalLM", f"{name}Config", {**_DECODER, **changes})


def _known(name: str) -> Callable[[], nn.Module]:
    return lambda: models.CAUSAL_LMS[name](vocab_size=VOCAB_SIZE)


_QWEN2_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": _known("llama"),
    "mistral": _decoder("Mistral", sliding_window=8),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _known("qwen3"),
    "gemma3": _known("gemma3"),
    "phi3": _known("phi3"),
    "gpt2": _known("gpt2"),
    "mixtral": _known("mixtral"),
    "qwen2-moe": _decoder("Qwen2Moe", **_QWEN2_MOE, shared_expert_intermediate_size=64),
    "qwen3-moe": _decoder("Qwen3Moe", **_QWEN2_MOE, head_dim=16),
    "mamba": _made(
        "MambaForCausalLM",
        "MambaConfig",
        {**_TOKENS, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    ),
    "bert": _made(
        "BertModel", "BertConfig", {**models.ENCODER, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
    ),
    "t5": _made(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **_TOKENS,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": _made(
        "BartForConditionalGeneration",
        "BartConfig",
        {**_TWO_STACKS, "max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": None},
    ),
    "whisper": _made(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_TWO_STACKS,
            "num_mel_bins": 16,
            "max_source_positions": 30,
            "max_target_positions": 32,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "vit": models.vit,
    "resnet": models.resnet,
    "llava": lambda: models.llava(vocab_size=VOCAB_SIZE),
}
"""Family -> function that makes its tiny model."""

ENCODER_DECODERS = ("t5", "bart", "whisper")
"""Families whose engines have two programs; without a cache they are one forward."""

ONE_FORWARD = ("bert", *ENCODER_DECODERS, "vit", "resnet")
"""Families that are judged in one forward."""

GENERATING = tuple(family for family in FAMILIES if family not in ONE_FORWARD)
"""Families with one program that has a cache."""

WITHOUT_TEXT = frozenset({"vit", "resnet"})
"""Families whose checkpoints have no tokenizer."""


def save_family(name: str, directory: Path) -> Path:
    """Write the tiny checkpoint of a family into `directory`; return it."""
    return save_checkpoint(FAMILIES[name](), directory, tokenizer=name not in WITHOUT_TEXT)
