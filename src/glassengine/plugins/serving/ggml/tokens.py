"""The tokenizer of a GGUF file: that of the checkpoint, where llama.cpp has its kind, so that it takes text."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

logger = logging.getLogger("glassengine")

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLITS = {
    rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
}
"""How a text is split into words -> what llama.cpp calls that. Without one of them ByteLevel splits as GPT-2 does."""

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


@dataclass(frozen=True)
class GgufVocabulary:
    """A tokenizer of byte pairs as GGUF files have it.

    Attributes:
        tokens: By id.
        types: What each is: normal, control, defined by a user, unused.
        merges: Pairs that are joined, the first first.
        split: How a text is split before, in llama.cpp's words.
        special: "bos", "eos", "pad" -> id.
        adds_bos: Whether a text begins with the token "bos".
        template: Of a chat.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    split: str
    special: Mapping[str, int]
    adds_bos: bool
    template: str | None


def vocabulary_of(module: nn.Module, directory: str | None) -> GgufVocabulary | None:
    """Return the tokenizer of a checkpoint; None, which is logged, where there is none that llama.cpp has.

    Args:
        module: Whose configuration names the size of the vocabulary.
        directory: Where the tokenizer is.
    """
    if directory is None:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError, ImportError):  # there is none
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = json.loads(backend.to_str()) if backend is not None else {}
    split = _split_of(described)
    if split is None:
        logger.warning("the GGUF file takes token ids alone: llama.cpp has no tokenizer like that of %s", directory)
        return None
    size = int(getattr(module.config, "vocab_size", 0)) or len(tokenizer)
    special = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    tokens, types = _tokens(described, size)
    bos = special["bos"]
    return GgufVocabulary(
        tokens=tokens,
        types=types,
        merges=[pair if isinstance(pair, str) else " ".join(pair) for pair in described["model"]["merges"]],
        split=split,
        special={name: number for name, number in special.items() if isinstance(number, int)},
        adds_bos=bos is not None and tokenizer("a")["input_ids"][:1] == [bos],
        template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    )


def _split_of(described: Mapping[str, Any]) -> str | None:
    """Return how a tokenizer splits texts, as llama.cpp calls it; None where it has nothing like it."""
    model, before = described.get("model") or {}, described.get("pre_tokenizer") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("continuing_subword_prefix"):
        return None
    if (described.get("normalizer") or {}).get("type", "NFC") != "NFC":
        return None
    steps = before.get("pretokenizers", [before])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return "gpt-2" if steps[0].get("use_regex", True) else None
    if len(steps) != 2 or steps[0].get("type") != "Split" or steps[-1].get("use_regex", True):
        return None
    return _SPLITS.get((steps[0].get("pattern") or {}).get("Regex", ""))


def _tokens(described: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    tokens, types = [f"[PAD{number}]" for number in range(size)], [_UNUSED] * size
    for text, number in described["model"]["vocab"].items():
        if number < size:
            tokens[number], types[number] = text, _NORMAL
    for added in described.get("added_tokens") or ():
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    return tokens, types


def add_vocabulary(writer: Any, vocabulary: GgufVocabulary | None) -> None:
    """Write a tokenizer with a `GGUFWriter`; None writes that there is none."""
    if vocabulary is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    writer.add_token_merges(list(vocabulary.merges))
    for name, number in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)
