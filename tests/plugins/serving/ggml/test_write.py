"""The tokenizer of a GGUF file: llama.cpp makes the same tokens of a text as transformers."""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from glassengine.plugins.serving.ggml.child import find_library
from glassengine.plugins.serving.ggml.library import GgufModel
from glassengine.plugins.serving.ggml.write import _split_of, vocabulary_of, write_gguf

MODEL = Path(__file__).parents[4] / "examples" / "tiny-llama"
TEXTS = ["The history of numbers", "  two  spaces,\n\nlines\t1234567 isn't it's", "žluťoučký 東京 🙂 naïve", ""]


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    vocabulary = vocabulary_of(module, str(MODEL))
    assert vocabulary is not None and vocabulary.split == "gpt-2"
    write_gguf(module, tmp_path / "model.gguf", vocabulary=vocabulary)
    opened = GgufModel(str(find_library(None)), str(tmp_path / "model.gguf"))
    tokenize = opened.library.llama_tokenize
    tokenize.argtypes = [c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool]
    tokenize.restype = c.c_int32
    vocab = opened.library.llama_model_get_vocab(opened.model)
    for text in TEXTS:
        raw, room = text.encode(), (c.c_int32 * 256)()
        number = tokenize(vocab, raw, len(raw), room, 256, True, True)
        assert list(room[:number]) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("change", "split"),
    [
        ({}, "gpt-2"),
        ({"model": {"type": "Unigram"}}, None),
        ({"model": {"type": "BPE", "byte_fallback": True}}, None),
        ({"normalizer": {"type": "Lowercase"}}, None),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, None),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}}, None),
    ],
)
def test_a_tokenizer_that_llama_cpp_has_not_is_left_out(change: dict[str, Any], split: str | None) -> None:
    described = {"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}, "normalizer": None}
    assert _split_of({**described, **change}) == split
