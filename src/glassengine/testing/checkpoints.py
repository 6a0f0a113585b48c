"""Tiny checkpoints with a tokenizer, as `save_pretrained` writes them: what `glass build` is tested with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

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
